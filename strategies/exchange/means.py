"""The means over all replicas of all instances, bucket by bucket, in the order of the tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collectives import Communicator
from strategies.exchange.flat import FlatLayout, private_memory
from strategies.exchange.host_copies import Arriving
from strategies.exchange.int8 import Int8Layout, Int8Reduction

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Makes memory of a shape and dtype; a collective call where instances share it."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        name: of their collectives.
        layout: how they lie in buffers.
        results: where the means of the buffers go.
        scattered: the numbers of the buffers of whose mean this instance gets its part only.
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
            name: see there.
            layout: see there.
            allocate: makes memory.
            parts: by the numbers of leaves how many elements this instance gets of their means. A leaf that lies in a
                buffer with others is not cut.
            given: by the numbers of buffers memory that is there already.
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
        """Return the mean of a leaf; of one that is scattered this instance's part, flat."""
        number = self.layout.buffer_of(leaf)
        return self.results[number] if number in self.scattered else self.layout.view(leaf, self.results)

    @cached_property
    def whole(self) -> Mapping[int, str]:
        """The numbers of the other buffers, but for empty ones, and the names of their collectives."""
        return {
            number: f"{self.name}/{buffer.name}"
            for number, buffer in enumerate(self.layout.buffers)
            if buffer.size and number not in self.scattered
        }


class Means:
    """Has the means of buckets computed by the instances together.

    Args:
        communicator: connects the instances.
        replicas: how many there are on all of them.
        quantised: how gradients lie in the payload, the last buffer of a bucket; None where they are not quantised.

    Attributes:
        of_payload: where the means of quantised gradients are; None where they are not quantised.
    """

    def __init__(self, communicator: Communicator, replicas: int, quantised: Int8Layout | None) -> None:
        self._communicator = communicator
        self._quantised = None if quantised is None else Int8Reduction(quantised, communicator, replicas)
        self.of_payload = None if quantised is None else quantised.new_result()

    def reduce(self, bucket: Bucket, contributions: Sequence[Sequence[np.ndarray]]) -> None:
        """Have the means in the bucket's results, or in `of_payload`; collective calls.

        Args:
            bucket: what travels together.
            contributions: for each buffer those of the local replicas, in their order.
        """
        for number in sorted(bucket.scattered):
            name = f"{bucket.name}/{bucket.layout.buffers[number].name}"
            self._communicator.ordered_reduce_scatter(contributions[number], bucket.results[number], "mean", name=name)
            if isinstance(contributions, Arriving):
                contributions.added(number, bucket.results[number])
        whole = list(bucket.whole)
        if self._quantised is not None:
            assert self.of_payload is not None
            self._quantised.reduce(contributions[whole.pop()], self.of_payload, name=f"{bucket.name}/payload")
        if isinstance(contributions, Arriving):
            self._reduce_arriving(bucket, contributions, whole)
        else:
            self._reduce_whole(bucket, contributions, whole)

    def _reduce_arriving(self, bucket: Bucket, contributions: Arriving, numbers: Sequence[int]) -> None:
        """Add what is there while the rest arrives, and have each mean sent on at once."""
        sums, results = contributions.sums, bucket.results
        in_place = [number for number in numbers if sums is not None and sums.can_add(results[number])]
        for number in numbers:
            if number not in in_place:
                self._reduce_whole(bucket, contributions, [number])
                contributions.added(number, results[number])
        if sums is None:
            return
        for group in sums.groups(in_place, results):
            for number in group:
                contributions.await_buffer(number)
            sums.add(bucket.name, group, results)
            for number in group:
                contributions.added(number, results[number])

    def _reduce_whole(
        self, bucket: Bucket, contributions: Sequence[Sequence[np.ndarray]], numbers: Sequence[int]
    ) -> None:
        self._communicator.grouped_ordered_all_reduce(
            [contributions[number] for number in numbers],
            [bucket.results[number] for number in numbers],
            "mean",
            names=[bucket.whole[number] for number in numbers],
        )
