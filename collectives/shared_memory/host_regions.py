"""Memory of the host that several processes map, in which frameworks compute on CPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np

from collectives.dlpack import CPU, ExportedArray
from collectives.mapped import Copied, MappedMemory, Region
from collectives.shared_memory.segment import SHARED_MEMORY_DIR, create_segment, open_segment


@final
class HostRegion:
    """A segment, as this process maps it; unmapped when nothing reads it any more.

    Attributes:
        address: see `Region`.
        nbytes: see `Region`.
    """

    def __init__(self, segment: mmap.mmap) -> None:
        self._bytes: np.ndarray | None = np.frombuffer(segment, np.uint8)
        self.address: int = self._bytes.__array_interface__["data"][0]
        self.nbytes = self._bytes.nbytes

    @property
    def memory(self) -> np.ndarray:
        """All of it as uint8; what holds a part of this keeps it mapped."""
        assert self._bytes is not None, "the region has been closed"
        return self._bytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype, start: int = 0) -> ExportedArray:
        """See `Region`."""
        return ExportedArray(self.address + start, shape, dtype, (CPU, 0))

    def close(self) -> None:
        """See `Region`."""
        self._bytes, self.address = None, 0


@final
class HostMemory(MappedMemory):
    """Memory of the host; a handle is the path of a segment.

    Args:
        directory: where segments are made.
    """

    def __init__(self, directory: Path = SHARED_MEMORY_DIR) -> None:
        self._directory = directory
        self._paths: list[Path] = []

    def make(self, nbytes: int) -> tuple[Region, bytes]:
        """See `MappedMemory`."""
        segment, path = create_segment(nbytes, self._directory)
        self._paths.append(path)
        return HostRegion(segment), os.fsencode(path)

    def open(self, handle: bytes, nbytes: int) -> Region:
        """See `MappedMemory`."""
        return HostRegion(open_segment(Path(os.fsdecode(handle)), nbytes))

    def settle(self) -> None:
        """See `MappedMemory`."""
        while self._paths:
            self._paths.pop().unlink()

    def copy(self, copied: Iterable[Copied]) -> None:
        """See `MappedMemory`."""
        for to, source, nbytes in copied:
            ctypes.memmove(to, source, nbytes)
