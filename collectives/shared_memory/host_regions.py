"""Host memory that several processes map, for computations of frameworks on CPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np
from typing_extensions import override

from collectives.dlpack import CPU, ExportedArray
from collectives.mapped import Copied, MappedMemory, Region
from collectives.shared_memory.segment import SHARED_MEMORY_DIR, create_segment, open_segment


@final
class HostRegion:
    """A shared memory segment as this process maps it; unmapped when no array refers to it any more.

    Attributes:
        address: Start address in this process; 0 after `close`.
        nbytes: Size in bytes.
    """

    def __init__(self, segment: mmap.mmap) -> None:
        self._bytes: np.ndarray | None = np.frombuffer(segment, np.uint8)
        self.address: int = self._bytes.__array_interface__["data"][0]
        self.nbytes = self._bytes.nbytes

    @property
    def memory(self) -> np.ndarray:
        """The whole segment as uint8; an array that refers to it keeps it mapped."""
        assert self._bytes is not None, "the region has been closed"
        return self._bytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype, start: int = 0) -> ExportedArray:
        """Return an array in this memory, for import by a framework; `start` is its offset in bytes."""
        return ExportedArray(self.address + start, shape, dtype, (CPU, 0))

    def close(self) -> None:
        """Release the segment. Arrays in it must not be used afterwards."""
        self._bytes, self.address = None, 0


@final
class HostMemory(MappedMemory):
    """Host memory; a handle is the path of a segment.

    Args:
        directory: Directory of the segments.
    """

    def __init__(self, directory: Path = SHARED_MEMORY_DIR) -> None:
        self._directory = directory
        self._paths: list[Path] = []

    @override
    def make(self, nbytes: int) -> tuple[Region, bytes]:
        segment, path = create_segment(nbytes, self._directory)
        self._paths.append(path)
        return HostRegion(segment), os.fsencode(path)

    @override
    def open(self, handle: bytes, nbytes: int) -> Region:
        return HostRegion(open_segment(Path(os.fsdecode(handle)), nbytes))

    @override
    def settle(self) -> None:
        while self._paths:
            self._paths.pop().unlink()

    @override
    def copy(self, copied: Iterable[Copied]) -> None:
        for to, source, nbytes in copied:
            ctypes.memmove(to, source, nbytes)
