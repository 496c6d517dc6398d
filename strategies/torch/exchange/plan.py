"""The plan of gradients: their buckets, the numbers that travel behind them, and the interface of their exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from strategies.core.agreement import Members, replicas_where
from strategies.core.metrics import UnreadArray
from strategies.core.options import weighted_means
from strategies.errors import StrategyError
from strategies.exchange.flat import FlatLayout, GradientTransfer, Shards
from strategies.exchange.means import Allocate, Bucket
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


@dataclass(frozen=True)
class GradientPlace:
    """The place of a gradient in the buffers that travel.

    Attributes:
        bucket: The number of the bucket.
        buffer: The number of the buffer in the bucket.
        start: The element of the buffer at which the gradient begins.
        stop: The element after its last one.
        is_of_one: Whether the gradient has the buffer alone.
    """

    bucket: int
    buffer: int
    start: int
    stop: int
    is_of_one: bool


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
            if self.streams and nbytes >= BUCKET_BYTES:
                found.append([])
                nbytes = 0
            found[-1].append(number)
            nbytes += math.prod(self.parameters[number].shape) * self.parameters[number].dtype.itemsize
        return tuple(map(tuple, found))

    @cached_property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """The layout of each bucket in buffers."""
        found, last = [], len(self.members) - 1
        for bucket, numbers in enumerate(self.members):
            parameters = [self.parameters[number] for number in numbers]
            shapes = tuple(parameter.shape for parameter in parameters)
            dtypes = tuple(self.transfer.dtype_of(parameter.dtype) for parameter in parameters)
            multiple = self.shards.replicas if self.shards else 1
            found.append(FlatLayout(shapes, dtypes, self.tail if bucket == last else 0, multiple))
        return tuple(found)

    @cached_property
    def places(self) -> tuple[GradientPlace, ...]:
        """The place of each parameter's gradient."""
        found = {}
        for bucket, (numbers, layout) in enumerate(zip(self.members, self.layouts, strict=True)):
            for leaf, number in enumerate(numbers):
                where, start = layout.places[leaf]
                stop = start + math.prod(layout.shapes[leaf])
                found[number] = GradientPlace(bucket, where, start, stop, layout.buffers[where].is_of_one)
        return tuple(found[number] for number in range(len(self.parameters)))

    def buckets(self, allocate: Allocate, writes_over: bool) -> list[Bucket]:
        """Return memory for the means of each bucket. Collective if `allocate` is.

        Args:
            allocate: Makes memory.
            writes_over: Whether buffers of one gradient get no memory, because their means are written over gradients.
        """
        found = []
        for bucket, layout in enumerate(self.layouts):
            parts, given = {}, {}
            if self.shards is not None:
                parts = self.shards.sizes([self.parameters[number] for number in self.members[bucket]])
            elif writes_over:
                buffers = enumerate(layout.buffers)
                given = {number: np.empty(0, buffer.dtype) for number, buffer in buffers if buffer.is_of_one}
            found.append(Bucket.of(f"{self.title}/{bucket}", layout, allocate, parts, given))
        return found


@dataclass(frozen=True)
class Tail:
    """Means over all replicas of the metrics and flags that are sent behind the gradients.

    Attributes:
        metrics: The metrics, float32, in the order of their names; weighted means if losses have weights. On a device
            they may be unread.
        notice: The share of the replicas whose instance was given a notice.
        settings: The mean of `StepSettings.settings_hash`, and the mean of its square.
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
class TailValues:
    """One replica's metrics and flags, which are sent behind its gradients.

    Attributes:
        metrics: The metrics; the weight of the losses is the last one, if they have weights.
        settings: The hash of the settings, see `StepSettings.settings_hash`.
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
    def facts(self) -> list[Fact]:
        """All values, in the order in which they travel."""
        return [*self.metrics, self.notice, self.settings, self.settings**2, *self.has_gradient, *self.has_changed]


def check_gradients_on_all(
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
    if some := np.flatnonzero((shares > 0) & (shares < active)).tolist():
        lacking = replicas_where(members, [not one for one in seen(some[0])], "who lacks a gradient")
        raise StrategyError(
            f"{plan.parameters[some[0]].name} has no gradient on the replicas {lacking}, and one on the others; let "
            f"the loss of every replica depend on it, if only by 0 * parameter.sum(){more}; or count the missing "
            'gradients as zeros, as missing_gradients="zero" does'
        )
