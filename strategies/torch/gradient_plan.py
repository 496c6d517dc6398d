"""How the gradients of a module travel: in which buckets, and where each lies there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collectives.arrays import aligned_empty
from strategies.exchange.flat import FlatLayout
from strategies.exchange.means import Bucket
from strategies.exchange.transfer import GradientTransfer, Int8Layout
from strategies.gradients.leaving import Allocate
from strategies.replicas.shards import Shards

BUCKET_BYTES = 4 << 20
"""Gradients that are streamed leave as so many bytes are ready."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that is trained, by what is the same on all replicas.

    Attributes:
        name: as `named_parameters` has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class GradientPlace:
    """The place of a gradient in a plan.

    Attributes:
        leaf: its number in the bucket's layout.
    """

    bucket: int
    leaf: int


@dataclass(frozen=True)
class TorchGradientPlan:
    """A plan of which gradients travel together: from the last parameter to the first, as backward passes finish them.

    Attributes:
        transfer: in which dtype they travel.
        streams: whether there are several buckets.
        shards: how means of large gradients are cut, of which an instance gets its part; None for whole means.
        tail: how many float32 values travel behind the last bucket.
    """

    parameters: tuple[Parameter, ...]
    transfer: GradientTransfer
    streams: bool = False
    shards: Shards | None = None
    tail: int = 0
    title: str = "gradients"

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the parameters in each bucket."""
        found: list[list[int]] = [[]]
        nbytes = 0
        for number in reversed(range(len(self.parameters))):
            if self.is_cut and nbytes >= BUCKET_BYTES:
                found.append([])
                nbytes = 0
            found[-1].append(number)
            nbytes += self.parameters[number].nbytes
        return tuple(map(tuple, found))

    @property
    def is_cut(self) -> bool:
        """Whether there may be several buckets: the blocks of int8 gradients go through all of them."""
        return self.streams and not self.transfer.is_quantised

    @cached_property
    def quantised(self) -> Int8Layout | None:
        """The layout of int8 gradients in their payload, in the order of the parameters; None for other dtypes."""
        return Int8Layout.of(self.parameters) if self.transfer.is_quantised else None

    @cached_property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """The layout of each bucket in buffers."""
        last = len(self.members) - 1
        return tuple(
            self._layout(numbers, self.tail if bucket == last else 0) for bucket, numbers in enumerate(self.members)
        )

    def _layout(self, numbers: Sequence[int], tail: int) -> FlatLayout:
        if self.quantised is not None:
            return FlatLayout(((self.quantised.payload_size,),), (np.dtype(np.int8),), tail)
        parameters = [self.parameters[number] for number in numbers]
        return FlatLayout(
            tuple(parameter.shape for parameter in parameters),
            tuple(self.transfer.dtype_of(parameter.dtype) for parameter in parameters),
            tail,
            self.shards.replicas if self.shards else 1,
        )

    @cached_property
    def places(self) -> tuple[GradientPlace, ...]:
        """The place of each parameter's gradient."""
        of_number = {
            number: GradientPlace(bucket, leaf)
            for bucket, numbers in enumerate(self.members)
            for leaf, number in enumerate(numbers)
        }
        return tuple(of_number[number] for number in range(len(self.parameters)))

    @cached_property
    def scattered(self) -> tuple[bool, ...]:
        """Whether an instance gets only its part of the mean gradient, for each parameter."""
        return tuple(self._has_parts(number) for number in range(len(self.parameters)))

    def _has_parts(self, number: int) -> bool:
        if self.shards is None or self.transfer.is_quantised or not self.shards.divides(self.parameters[number]):
            return False
        place = self.places[number]
        name, _ = self.layouts[place.bucket].places[place.leaf]
        return name != self.layouts[place.bucket].dtypes[place.leaf].name

    def buckets(self, allocate: Allocate) -> list[Bucket]:
        """Return memory for the means of each bucket; a collective call where `allocate` is one."""
        return [self._bucket(number, layout, allocate) for number, layout in enumerate(self.layouts)]

    def _bucket(self, bucket: int, layout: FlatLayout, allocate: Allocate) -> Bucket:
        results, scattered = [], set()
        for place, buffer in enumerate(layout.buffers):
            if self.shards is not None and buffer.is_of_one and self.scattered[self.members[bucket][buffer.leaves[0]]]:
                size = buffer.size // self.shards.replicas * self.shards.local
                results.append(aligned_empty(size * buffer.dtype.itemsize).view(buffer.dtype))
                scattered.add(place)
            elif self.quantised is not None and buffer.dtype == np.int8:
                results.append(np.empty(0, np.int8))  # `Means.of_payload` is where they go
            else:
                results.append(allocate((buffer.size,), buffer.dtype))
        return Bucket(f"{self.title}/{bucket}", layout, tuple(results), frozenset(scattered))

    def mean(self, number: int, buckets: Sequence[Bucket], of_payload: np.ndarray | None) -> np.ndarray:
        """Return the mean of a gradient in that memory; of one that is scattered this instance's part, flat."""
        if self.quantised is not None:
            assert of_payload is not None
            return self.quantised.views(of_payload)[number]
        place = self.places[number]
        bucket = buckets[place.bucket]
        if self.scattered[number]:
            name, _ = bucket.layout.places[place.leaf]
            names = [buffer.name for buffer in bucket.layout.buffers]
            return bucket.results[names.index(name)]
        return bucket.layout.view(place.leaf, bucket.results)
