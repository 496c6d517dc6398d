"""Copies of gradients from a GPU to the host, and of their means back, at the speed of the bus.

Host memory is page-locked, and the CUDA driver copies: 55 GB/s on an H100. `np.asarray` reaches 1 GB/s, and a copy of
NumPy's memory to the device 5 GB/s. While one buffer is added, the next ones are copied.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import numpy as np

from collectives.cuda.device import CopyMark, CudaDevice
from collectives.cuda.memory import DeviceMemory, PageLocked
from collectives.dlpack import ExportedArray
from strategies.exchange.host_sums import HostSums, aligned
from strategies.exchange.page_locks import locked


@dataclass(frozen=True)
class Source:
    """A finished, contiguous array on a GPU.

    Attributes:
        address: Address of its first element.
        size: Number of elements.
        dtype: Dtype of its elements.
    """

    address: int
    size: int
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return self.size * self.dtype.itemsize


class Arriving(Sequence[Sequence[np.ndarray]]):
    """The contributions to each buffer of a bucket while they are copied to the host. Reading an item waits for it.

    Args:
        arrays: Contributions of the local replicas to each buffer.
        marks: End of the copies of each buffer.
        added: Callback (number of a buffer, mean), called as soon as the mean is known.
        sums: Adds the contributions in shared memory; None if a transport adds them.
    """

    def __init__(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        marks: Sequence[CopyMark],
        added: Callable[[int, np.ndarray], None] = lambda number, mean: None,
        sums: HostSums | None = None,
    ) -> None:
        self._arrays = arrays
        self._marks = marks
        self.added = added
        self.sums = sums

    @overload
    def __getitem__(self, number: int) -> Sequence[np.ndarray]: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Sequence[np.ndarray]]: ...

    def __getitem__(self, number: int | slice) -> Sequence[np.ndarray] | Sequence[Sequence[np.ndarray]]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        self.await_buffer(number)
        return self._arrays[number]

    def await_buffer(self, number: int) -> None:
        """Wait until the contributions to a buffer are on the host."""
        self._marks[number].wait()

    def __len__(self) -> int:
        return len(self._arrays)


class HostCopies:
    """The copies of one instance between its GPU and the host, made one after the other.

    Args:
        device: GPU of the instance.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._rooms: dict[Hashable, _Room] = {}
        self._locks: dict[Hashable, list[PageLocked]] = {}

    def fetch(
        self,
        key: Hashable,
        sources: Sequence[Sequence[Source]],
        added: Callable[[int, np.ndarray], None] = lambda number, mean: None,
        sums: HostSums | None = None,
    ) -> Arriving:
        """Begin to copy arrays to page-locked memory.

        Args:
            key: Key of the memory; the next fetch with this key overwrites it.
            sources: Arrays of the local replicas for each buffer; not to be changed before their copies are read.
            added: Callback (number of a buffer, mean), called as soon as the mean is known.
            sums: Owner of the memory, which adds the contributions; None for memory of this instance alone.
        """
        arrays = self._places(key, sources) if sums is None else sums.own
        if sums is not None and key not in self._locks:
            self._locks[key] = locked(self._device, [sums.memory])
        marks = []
        for places, of_buffer in zip(arrays, sources, strict=True):
            copied = zip(places, of_buffer, strict=True)
            self._device.copy_all((_address(place), one.address, one.nbytes) for place, one in copied)
            marks.append(self._device.mark())
        return Arriving(arrays, marks, added, sums)

    def _places(self, key: Hashable, sources: Sequence[Sequence[Source]]) -> list[list[np.ndarray]]:
        lengths = [aligned(one.nbytes) for of_buffer in sources for one in of_buffer]
        room, starts = self._room(key, sum(lengths)), iter(accumulate(lengths, initial=0))
        return [[room.array(next(starts), one) for one in of_buffer] for of_buffer in sources]

    def means(self, results: Iterable[np.ndarray]) -> MeansOnDevice:
        """Return memory on the GPU for means, and page-lock the host memory from which they are copied.

        Args:
            results: Host memory that will hold the means; kept alive.

        Raises:
            CudaError: The GPU has too little memory.
        """
        return MeansOnDevice(self._device, list(results))

    def _room(self, key: Hashable, nbytes: int) -> _Room:
        room = self._rooms.get(key)
        if room is None or room.nbytes < nbytes:
            self._rooms.pop(key, None)
            room = self._rooms[key] = _Room(self._device, nbytes)
        return room


class _Room:
    """Private host memory, page-locked if the driver allows it."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
        self._locked = locked(device, [self._memory])

    def array(self, start: int, source: Source) -> np.ndarray:
        """Return the memory for the copy of `source` that begins at byte `start`."""
        place: np.ndarray = self._memory[start : start + source.nbytes].view(source.dtype)
        return place


class MeansOnDevice:
    """The means of gradients on a GPU, in the order of the host's.

    Made by `HostCopies.means`.
    """

    def __init__(self, device: CudaDevice, results: Sequence[np.ndarray]) -> None:
        self._device = device
        self._ranges = list(_ranges(results))
        self._first = [one.start for one in self._ranges]
        lengths = [aligned(len(one)) for one in self._ranges]
        *self._starts, end = accumulate(lengths, initial=0)
        self._memory = DeviceMemory(device, max(1, end))
        self._locked = locked(device, results)

    def begin(self, mean: np.ndarray) -> None:
        """Begin to copy a mean, or a part of one, to the GPU. Programs that read the previous mean must have ended."""
        place = self._place(mean)
        if mean.nbytes and place is not None:
            self._device.copy(self._memory.address + place, _address(mean), mean.nbytes)

    def wait(self) -> None:
        """Wait until all copies have ended. Then means on the host may be overwritten, and those on the GPU read."""
        self._device.synchronize()

    def on_device(self, mean: np.ndarray) -> ExportedArray | None:
        """Return the copy on the GPU of a mean on the host; None if the array is not one of the copied means."""
        place = self._place(mean)
        return None if place is None else self._memory.array(mean.shape, mean.dtype, place)

    def _place(self, mean: np.ndarray) -> int | None:
        """Return the offset in the GPU's memory, in bytes, at which an array begins."""
        address = _address(mean)
        number = bisect_right(self._first, address) - 1
        if number < 0 or address + mean.nbytes > self._ranges[number].stop:
            return None
        return self._starts[number] + address - self._first[number]


def _ranges(arrays: Iterable[np.ndarray]) -> Iterator[range]:
    """Yield the address ranges of arrays, in order; arrays that touch each other share a range."""
    last = range(0)
    for start, stop in sorted((_address(array), _address(array) + array.nbytes) for array in arrays):
        if last and start <= last.stop:
            last = range(last.start, max(stop, last.stop))
            continue
        if last:
            yield last
        last = range(start, stop)
    if last:
        yield last


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
