"""Sums, by several threads, of gradients that GPUs have copied into memory shared by the instances of a host.

Instance j adds slice j of all replicas directly from the memory into which the drivers copied it. It writes the mean
once, into memory that all instances read. The sum has the tree's order, as in every exchange.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import accumulate, islice

import numpy as np

from collectives import Communicator
from collectives.mapped import Region
from collectives.reduction import Reduction
from collectives.shared_memory.host_regions import HostMemory, HostRegion
from collectives.shared_memory.reduction import slice_bounds
from strategies.exchange.flat import Buffer
from strategies.exchange.windows import share_windows

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
        Reduction("mean", result.dtype).reduce(sources, result[piece], self._replicas)


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
