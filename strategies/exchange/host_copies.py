"""Copies of gradients from a GPU to the host, their sums there, and copies of their means back.

Instance j adds slice j of all replicas directly from the memory into which the drivers copied it. It writes the mean
once, into memory that all instances read. The sum has the tree's order, as in every exchange.

Host memory is page-locked, and the CUDA driver copies: 55 GB/s on an H100. `np.asarray` reaches 1 GB/s, and a copy of
NumPy's memory to the device 5 GB/s. While one buffer is added, the next ones are copied.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import overload

import numpy as np

from collectives import Communicator
from collectives.cuda.device import CopyMark, CudaDevice
from collectives.cuda.memory import DeviceMemory, PageLocked
from collectives.dlpack import ExportedArray
from collectives.mapped import Region
from collectives.reduction import Reduction
from collectives.shared_memory.host_regions import HostMemory, HostRegion
from collectives.shared_memory.reduction import slice_bounds
from strategies.exchange.flat import Buffer, op_of
from strategies.exchange.window_path import locked, share_windows

_ALIGNMENT_BYTES = 256
_GROUP_BYTES = 1 << 25
"""The size of a group of buffers added together while others arrive; instances meet twice for each group."""
_PIECE_BYTES = 1 << 20
_THREADS = 8


class HostSums:
    """The contributions of all instances of a host to one bucket, in memory that they share. Collective.

    Args:
        communicator: Communicator of the instances, all on one host.
        counts: Number of local replicas of each instance.
        buffers: Buffers of the bucket.

    Attributes:
        own: Places for the contributions of this instance's replicas to each buffer.
        memory: Memory of these places, as uint8.

    Raises:
        MappingError: There is too little shared memory; all instances raise it.
    """

    def __init__(self, communicator: Communicator, counts: Sequence[int], buffers: Sequence[Buffer]) -> None:
        self._communicator = communicator
        self._replicas = sum(counts)
        lengths = [
            [aligned(buffer.size * buffer.dtype.itemsize) for buffer in buffers for _ in range(count)]
            for count in counts
        ]
        windows = share_windows(communicator, HostMemory(), max(1, *map(sum, lengths)))
        memory = [_memory_of(windows.of(rank)) for rank in range(communicator.size)]
        of_ranks = [
            _arrays(of_rank, buffers, count, own) for of_rank, count, own in zip(memory, counts, lengths, strict=True)
        ]
        self.memory = memory[communicator.rank]
        self.own = of_ranks[communicator.rank]
        self._all = [[one for of_rank in of_ranks for one in of_rank[number]] for number in range(len(buffers))]
        self._threads = _pool(max(1, min(_THREADS, len(os.sched_getaffinity(0)) // communicator.size)))

    def can_add(self, result: np.ndarray) -> bool:
        """Return whether all instances read this mean from the same memory."""
        return self._communicator.is_shared(result.nbytes)

    def groups(self, numbers: Sequence[int], results: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """Yield the numbers of buffers to be added together, in order."""
        group: list[int] = []
        nbytes = 0
        for number in numbers:
            group.append(number)
            nbytes += results[number].nbytes
            if nbytes >= _GROUP_BYTES:
                yield group
                group, nbytes = [], 0
        if group:
            yield group

    def add(self, name: str, numbers: Sequence[int], results: Sequence[np.ndarray]) -> None:
        """Write the means of some buffers into `results`. Collective. This instance's contributions must have arrived.

        Args:
            name: Name of the collective.
            numbers: Numbers of the buffers.
            results: Memory for the means of all buffers, shared by the instances.
        """
        which = ", ".join(map(str, numbers))
        self._communicator.barrier(name=f"{name}: buffers {which} are there")
        begun = [
            self._threads.submit(self._add, number, results[number], piece) for number, piece in self._own(numbers)
        ]
        wait(begun)
        for future in begun:
            future.result()
        self._communicator.barrier(name=f"{name}: buffers {which} are added")

    def _own(self, numbers: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """Yield the pieces of this instance's slices, as (number of the buffer, elements)."""
        size, rank = self._communicator.size, self._communicator.rank
        for number in numbers:
            one = self._all[number][0]
            bounds = slice_bounds(one.size, size, _ALIGNMENT_BYTES // one.itemsize)
            step = _PIECE_BYTES // one.itemsize
            for start in range(bounds[rank], bounds[rank + 1], step):
                yield number, slice(start, min(start + step, bounds[rank + 1]))

    def _add(self, number: int, result: np.ndarray, piece: slice) -> None:
        sources = [one[piece] for one in self._all[number]]
        Reduction(op_of(result.dtype), result.dtype).reduce(sources, result[piece], self._replicas)


def _memory_of(region: Region) -> np.ndarray:
    assert isinstance(region, HostRegion)
    return region.memory


def _arrays(
    memory: np.ndarray, buffers: Sequence[Buffer], count: int, lengths: Sequence[int]
) -> list[list[np.ndarray]]:
    """Return an instance's places for each buffer, one place for each of its replicas."""
    starts = accumulate(lengths, initial=0)
    return [
        [memory[start : start + buffer.size * buffer.dtype.itemsize].view(buffer.dtype) for start in of_buffer]
        for buffer, of_buffer in ((buffer, list(islice(starts, count))) for buffer in buffers)
    ]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "sums of gradients")


def aligned(nbytes: int) -> int:
    """Return the size of an array in bytes, padded so that the next array begins where a GPU copies fast."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


# ---- copies


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


class PendingCopies(Sequence[Sequence[np.ndarray]]):
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
        self._buffers: dict[Hashable, _HostBuffer] = {}
        self._locks: dict[Hashable, list[PageLocked]] = {}

    def fetch(
        self,
        key: Hashable,
        sources: Sequence[Sequence[Source]],
        added: Callable[[int, np.ndarray], None] = lambda number, mean: None,
        sums: HostSums | None = None,
    ) -> PendingCopies:
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
        return PendingCopies(arrays, marks, added, sums)

    def _places(self, key: Hashable, sources: Sequence[Sequence[Source]]) -> list[list[np.ndarray]]:
        lengths = [aligned(one.nbytes) for of_buffer in sources for one in of_buffer]
        buffer, starts = self._buffer(key, sum(lengths)), iter(accumulate(lengths, initial=0))
        return [[buffer.array(next(starts), one) for one in of_buffer] for of_buffer in sources]

    def means(self, results: Iterable[np.ndarray]) -> MeansOnDevice:
        """Return memory on the GPU for means, and page-lock the host memory from which they are copied.

        Args:
            results: Host memory that will hold the means; kept alive.

        Raises:
            CudaError: The GPU has too little memory.
        """
        return MeansOnDevice(self._device, list(results))

    def _buffer(self, key: Hashable, nbytes: int) -> _HostBuffer:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers.pop(key, None)
            buffer = self._buffers[key] = _HostBuffer(self._device, nbytes)
        return buffer


class _HostBuffer:
    """Private host memory, page-locked if the driver allows it."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
        self._locked = locked(device, [self._memory])

    def array(self, start: int, source: Source) -> np.ndarray:
        """Return the memory for the copy of `source` that begins at byte `start`."""
        return self._memory[start : start + source.nbytes].view(source.dtype)


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
