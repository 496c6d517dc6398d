"""The means over all replicas of all instances, bucket by bucket, in the order of the tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collectives import Communicator
from strategies.exchange.flat import FlatLayout
from strategies.exchange.int8 import Int8Layout, Int8Reduction


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
        whole = list(bucket.whole)
        if self._quantised is not None:
            assert self.of_payload is not None
            self._quantised.reduce(contributions[whole.pop()], self.of_payload, name=f"{bucket.name}/payload")
        self._communicator.grouped_ordered_all_reduce(
            [contributions[number] for number in whole],
            [bucket.results[number] for number in whole],
            "mean",
            names=[bucket.whole[number] for number in whole],
        )
