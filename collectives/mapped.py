"""Memory that several processes of one host map, for what computes there: of the host, or of a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from collectives.dlpack import ExportedArray


class Region(Protocol):
    """A piece of memory, as one process maps it.

    Attributes:
        address: where it begins in this process.
        nbytes: its size.
    """

    address: int
    nbytes: int

    def array(self, shape: tuple[int, ...], dtype: np.dtype, start: int = 0) -> ExportedArray:
        """Return an array in this memory, for a framework to import.

        Args:
            shape: of the array.
            dtype: of its elements.
            start: the byte where it begins.
        """

    def close(self) -> None:
        """Give it back, or unmap it; arrays in it must not be used any more."""


class Copied(NamedTuple):
    """Bytes that are copied.

    Attributes:
        to: the address of the copy.
        source: where they lie.
        nbytes: how many.
    """

    to: int
    source: int
    nbytes: int


class MappedMemory(ABC):
    """A kind of memory that processes of one host map, each at an address of its own."""

    @abstractmethod
    def make(self, nbytes: int) -> tuple[Region, bytes]:
        """Return memory of this process, and the handle by which others open it.

        Raises:
            OSError: there is not as much of it.
            CudaError: likewise, or a GPU that does not share memory.
        """

    @abstractmethod
    def open(self, handle: bytes, nbytes: int) -> Region:
        """Return memory that another process has made.

        Raises:
            OSError: it cannot be mapped: the process is on another host, or in another container.
            CudaError: likewise.
        """

    @abstractmethod
    def settle(self) -> None:
        """Forget the names of what was made: everybody has opened it, or nobody will."""

    @abstractmethod
    def copy(self, copied: Iterable[Copied]) -> None:
        """Copy from finished memory, and wait for that. Nothing overlaps.

        Args:
            copied: one after the other.
        """

    def close(self) -> None:  # noqa: B027  # memory of the host has nothing to give back
        """Give back what copies need; regions are closed before."""
