"""The means over all replicas of all instances, bucket by bucket, in the order of the tree; integers are added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collectives import Communicator
from strategies.exchange.flat import FlatLayout, op_of, private_memory
from strategies.exchange.host_copies import PendingCopies

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""A function that makes memory of a shape and dtype; a collective call if instances share the memory."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together between instances.

    Attributes:
        name: Name of their collectives.
        layout: Places of the gradients in buffers.
        results: Memory for the means of the buffers.
        scattered: Numbers of the buffers whose mean this instance receives only in part.
    """

    name: str
    layout: FlatLayout
    results: tuple[np.ndarray, ...]
    scattered: frozenset[int]

    @classmethod
    def of(
        cls,
        name: str,
        layout: FlatLayout,
        allocate: Allocate,
        parts: Mapping[int, int],
        given: Mapping[int, np.ndarray],
    ) -> Bucket:
        """Return a bucket with memory for its means.

        Args:
            name: Name of its collectives.
            layout: Places of the gradients in buffers.
            allocate: Function that makes memory.
            parts: Number of elements of the mean that this instance receives, by the number of the leaf. A leaf that
                shares its buffer with others is not cut.
            given: Memory that exists already, by the number of the buffer.
        """
        scattered = {
            number: parts[buffer.leaves[0]]
            for number, buffer in enumerate(layout.buffers)
            if buffer.is_of_one and buffer.leaves[0] in parts
        }
        results = []
        for number, buffer in enumerate(layout.buffers):
            if number in given:
                results.append(given[number])
            elif number in scattered:
                results.append(private_memory((scattered[number],), buffer.dtype))
            else:
                results.append(allocate((buffer.size,), buffer.dtype))
        return cls(name, layout, tuple(results), frozenset(scattered))

    def mean(self, leaf: int) -> np.ndarray:
        """Return the mean of a leaf. If the leaf is scattered, return this instance's part, flat."""
        number = self.layout.buffer_of(leaf)
        return self.results[number] if number in self.scattered else self.layout.view(leaf, self.results)

    @cached_property
    def whole(self) -> Mapping[int, str]:
        """The non-empty buffers that are not scattered, by number, and the names of their collectives."""
        return {
            number: f"{self.name}/{buffer.name}"
            for number, buffer in enumerate(self.layout.buffers)
            if buffer.size and number not in self.scattered
        }

    @cached_property
    def in_parts(self) -> Mapping[int, str]:
        """The scattered buffers by number, in order, and the names of their collectives."""
        return {number: f"{self.name}/{self.layout.buffers[number].name}" for number in sorted(self.scattered)}

    @cached_property
    def is_one_group(self) -> bool:
        """Whether all buffers travel whole and have means, so that a step chooses none of them."""
        return len(self.whole) == len(self.results) and all(op_of(one.dtype) == "mean" for one in self.results)


class Means:
    """The means of buckets, and the sums of integers, computed by all instances together.

    Args:
        communicator: Communicator of the instances.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def reduce(self, bucket: Bucket, contributions: Sequence[Sequence[np.ndarray]]) -> None:
        """Write the means into the bucket's results. Collective.

        Args:
            bucket: Bucket to be reduced.
            contributions: Contributions of the local replicas to each buffer, in order of the replicas.
        """
        if bucket.is_one_group and not isinstance(contributions, PendingCopies):
            names = tuple(bucket.whole.values())
            self._communicator.grouped_ordered_all_reduce(contributions, bucket.results, "mean", names=names)
            return
        for number, name in bucket.in_parts.items():
            self._communicator.ordered_reduce_scatter(contributions[number], bucket.results[number], "mean", name=name)
            if isinstance(contributions, PendingCopies):
                contributions.added(number, bucket.results[number])
        if isinstance(contributions, PendingCopies):
            self._reduce_copied(bucket, contributions, list(bucket.whole))
        else:
            self.reduce_whole(bucket, contributions, list(bucket.whole), bucket.results)

    def _reduce_copied(self, bucket: Bucket, contributions: PendingCopies, numbers: Sequence[int]) -> None:
        """Add the buffers that have arrived while others are copied, and send each mean on at once."""
        sums, results = contributions.sums, bucket.results
        in_place = [number for number in numbers if sums is not None and sums.can_add(results[number])]
        for number in numbers:
            if number not in in_place:
                self.reduce_whole(bucket, contributions, [number], results)
                contributions.added(number, results[number])
        if sums is None:
            return
        for group in sums.groups(in_place, results):
            for number in group:
                contributions.await_buffer(number)
            sums.add(bucket.name, group, results)
            for number in group:
                contributions.added(number, results[number])

    def reduce_whole(
        self,
        bucket: Bucket,
        contributions: Sequence[Sequence[np.ndarray]],
        numbers: Sequence[int],
        results: Sequence[np.ndarray],
    ) -> None:
        """Write the means of some whole buffers into `results`, which has an array for each buffer. Collective."""
        for op in ("mean", "sum"):
            if group := [number for number in numbers if op_of(results[number].dtype) == op]:
                self._communicator.grouped_ordered_all_reduce(
                    [contributions[number] for number in group],
                    [results[number] for number in group],
                    op,
                    names=[bucket.whole[number] for number in group],
                )
