"""The plan of gradients: the buckets in which they travel, and the numbers that travel behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from strategies.core.gathering import replicas_where
from strategies.core.members import Members
from strategies.core.metrics import UnreadArray
from strategies.core.weights import weighted_means
from strategies.errors import StrategyError
from strategies.exchange.flat import FlatLayout
from strategies.exchange.int8 import Int8Layout
from strategies.exchange.means import Allocate, Bucket
from strategies.exchange.shards import Shards
from strategies.exchange.transfer import GradientTransfer
from strategies.torch.tensors import dtype_of, real_view

BUCKET_BYTES = 4 << 20
"""Size of a bucket of streamed gradients: it leaves when this many bytes are ready."""


@dataclass(frozen=True)
class Parameter:
    """The description of a trained parameter, the same on all replicas.

    Attributes:
        name: The name in `named_parameters`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Parameter:
        """Return the description of a parameter; a complex one travels as its real and imaginary parts."""
        real = real_view(tensor.detach())
        return cls(name, tuple(real.shape), dtype_of(real))

    @property
    def nbytes(self) -> int:
        """The bytes of the parameter's gradient."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class GradientPlace:
    """The place of a gradient in the buffers that travel.

    Attributes:
        bucket: The number of the bucket.
        leaf: The number of the gradient in the bucket's layout.
        buffer: The number of the buffer in the bucket.
        start: The element of the buffer at which the gradient begins.
        is_of_one: Whether the gradient has the buffer alone.
        size: Elements of the buffer.
        dtype: The dtype of the buffer.
    """

    bucket: int
    leaf: int
    buffer: int
    start: int
    is_of_one: bool
    size: int
    dtype: np.dtype


@dataclass(frozen=True)
class TorchGradientPlan:
    """The plan of the buckets of gradients, from the last parameter to the first, as backward passes compute them.

    Attributes:
        parameters: The trained parameters, in the order of the module.
        transfer: The dtype in which gradients travel.
        streams: Whether gradients are cut into several buckets.
        shards: The cut of large means into one shard per instance; None for whole means.
        tail: Number of float32 values that travel behind the last bucket.
        title: The name of the collectives.
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
        """Whether there may be several buckets. int8 gradients have one, because their blocks span all gradients."""
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
        """The place of each parameter's gradient. Not defined for quantised gradients."""
        found = {}
        for bucket, (numbers, layout) in enumerate(zip(self.members, self.layouts, strict=True)):
            for leaf, number in enumerate(numbers):
                where, start = layout.buffer_of(leaf), layout.places[leaf][1]
                buffer = layout.buffers[where]
                found[number] = GradientPlace(bucket, leaf, where, start, buffer.is_of_one, buffer.size, buffer.dtype)
        return tuple(found[number] for number in range(len(self.parameters)))

    def buckets(self, allocate: Allocate, writes_over: bool) -> list[Bucket]:
        """Return memory for the means of each bucket. Collective if `allocate` is.

        Args:
            allocate: Makes memory.
            writes_over: Whether buffers of one gradient get no memory, because their means are written over gradients.
        """
        return [self._bucket(number, layout, allocate, writes_over) for number, layout in enumerate(self.layouts)]

    def _bucket(self, number: int, layout: FlatLayout, allocate: Allocate, writes_over: bool) -> Bucket:
        parts, given = {}, {}
        if self.quantised is not None:
            given[layout.buffer_of(0)] = np.empty(0, np.int8)  # the means go to `Means.of_payload`
        elif self.shards is not None:
            parts = self.shards.sizes([self.parameters[one] for one in self.members[number]])
        elif writes_over:
            buffers = enumerate(layout.buffers)
            given = {place: np.empty(0, buffer.dtype) for place, buffer in buffers if buffer.is_of_one}
        return Bucket.of(f"{self.title}/{number}", layout, allocate, parts, given)

    @property
    def is_whole(self) -> bool:
        """Whether the exchange writes whole means in the dtypes of the buffers: neither shards nor means of int8."""
        return self.shards is None and self.quantised is None


@dataclass(frozen=True)
class Tail:
    """The numbers that travel behind the gradients, as means over all replicas.

    Attributes:
        metrics: The metrics, float32, in the order of their names; weighted means if losses have weights. On a device
            they may be unread.
        notice: The share of the replicas whose instance was given a notice.
        settings: The mean of `StepSettings.word`, and the mean of its square.
        has_gradient: For each parameter, the share of the replicas in which it has a gradient.
        has_changed: For each buffer, the share of the replicas that have changed it.
        weight: The mean weight of the losses; None if they have no weights.
    """

    metrics: UnreadArray
    notice: float
    settings: tuple[float, float]
    has_gradient: np.ndarray
    has_changed: np.ndarray
    weight: float | None = None

    @classmethod
    def of(cls, values: np.ndarray, metrics: int, parameters: int, is_weighted: bool = False) -> Tail:
        """Return the tail with these values. If losses have weights, their mean is the last of the metrics."""
        kept, first, last = values.copy(), metrics + 3, metrics + 3 + parameters
        notice, word, square = map(float, kept[metrics:first])
        of_metrics, weight = kept[:metrics], None
        if is_weighted:
            weight = float(of_metrics[-1])
            of_metrics = weighted_means(of_metrics[:-1], weight)
        return cls(of_metrics, notice, (word, square), kept[first:last], kept[last:], weight)

    @staticmethod
    def size(metrics: int, parameters: int, buffers: int) -> int:
        """Return the number of values in a tail."""
        return metrics + 3 + parameters + buffers


Fact: TypeAlias = float | torch.Tensor
"""A number on the host, or a tensor of no axes on the device."""


@dataclass(frozen=True)
class Told:
    """The numbers that a replica sends behind its gradients.

    Attributes:
        metrics: The metrics; the weight of the losses is the last one, if they have weights.
        settings: The hash of the settings, see `StepSettings.word`.
        has_gradient: For each trained parameter, whether it has a gradient.
        has_changed: For each buffer, whether the step has changed it: 0 or 1, and more if its shape has changed.
        notice: Whether the replica's instance was given a notice.
        weight: The mean weight of the losses; None if they have no weights.
    """

    metrics: Sequence[Fact]
    settings: int
    has_gradient: Sequence[bool]
    has_changed: Sequence[Fact]
    notice: bool = False
    weight: float | None = None

    @property
    def values(self) -> list[float]:
        """The values of the tail, after waiting for the device."""
        metrics, changed = map(float, self.metrics), map(float, self.has_changed)
        return [*metrics, self.notice, self.settings, self.settings**2, *self.has_gradient, *changed]


def refuse_gradients_of_some(
    plan: TorchGradientPlan,
    shares: np.ndarray,
    seen: Callable[[int], Iterable[bool]],
    members: Members,
    active: float = 1.0,
    more: str = "",
) -> None:
    """Raise if only some of the replicas have a gradient. Collective if so.

    Args:
        plan: The plan of the gradients.
        shares: For each parameter, the share of the replicas in which it has a gradient.
        seen: Returns for a parameter's number, for each local replica, whether it has the gradient.
        members: The instances.
        active: The share of the replicas that make the step.
        more: The end of the message.

    Raises:
        StrategyError: On all instances.
    """
    if (shares == active).all():
        return
    some = np.flatnonzero((shares > 0) & (shares < active)).tolist()
    if some:
        lacking = replicas_where(members, [not one for one in seen(some[0])], "who lacks a gradient")
        raise StrategyError(
            f"{plan.parameters[some[0]].name} has no gradient on the replicas {lacking}, and one on the others; let "
            f"the loss of every replica depend on it, if only by 0 * parameter.sum(){more}; or count the missing "
            'gradients as zeros, as missing_gradients="zero" does'
        )
