"""Memory of the host or of a GPU that several processes of one host map and compute in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from collectives.dlpack import ExportedArray


class Region(Protocol):
    """A piece of memory as one process maps it.

    Attributes:
        address: Start address in this process.
        nbytes: Size in bytes.
    """

    address: int
    nbytes: int

    def array(self, shape: tuple[int, ...], dtype: np.dtype, start: int = 0) -> ExportedArray:
        """Return an array in this memory, for import by a framework.

        Args:
            shape: Shape of the array.
            dtype: Dtype of its elements.
            start: Offset of the array in bytes.
        """

    def close(self) -> None:
        """Free or unmap the memory. Arrays in it must not be used afterwards."""


class Copied(NamedTuple):
    """A copy of bytes.

    Attributes:
        to: Destination address.
        source: Source address.
        nbytes: Number of bytes.
    """

    to: int
    source: int
    nbytes: int


class MappedMemory(ABC):
    """A kind of memory that processes of one host map, each at its own address.

    One process calls `make` and gives the handle to the others, which call `open`. When all have answered, successfully
    or not, the maker calls `settle`. Regions are closed before the memory.
    """

    @abstractmethod
    def make(self, nbytes: int) -> tuple[Region, bytes]:
        """Allocate memory in this process; return it with its handle for other processes.

        Raises:
            OSError: Too little memory is available.
            CudaError: The GPU has too little memory or cannot share it.
        """

    @abstractmethod
    def open(self, handle: bytes, nbytes: int) -> Region:
        """Map memory that another process has made.

        Raises:
            OSError: The memory cannot be mapped: its process is on another host or in another container.
            CudaError: The GPU cannot map it.
        """

    @abstractmethod
    def settle(self) -> None:
        """Remove the names of all memory made here; no other process will open it any more."""

    @abstractmethod
    def copy(self, copied: Iterable[Copied]) -> None:
        """Copy from complete memory, and wait for the end of the copies.

        Args:
            copied: Copies, which do not overlap.
        """

    def close(self) -> None:  # noqa: B027  # host memory holds no resources for copies
        """Release the resources for copies. All regions must be closed already."""
