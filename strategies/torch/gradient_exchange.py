"""The mean gradients of a module over all replicas, for one plan and the instances that there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from collectives import Communicator
from collectives.arrays import aligned_empty
from strategies.exchange.means import Means
from strategies.torch.gradient_plan import TorchGradientPlan
from strategies.torch.tensors import as_tensor


@dataclass(frozen=True)
class Tail:
    """Numbers that travel behind the gradients: means over all replicas.

    Attributes:
        metrics: float32, in the order of their names.
        notice: the share of the replicas to whose instance a notice was given.
        settings: of what the program may change, see `StepSettings.word`: the mean, and that of the squares.
        has_gradient: for each parameter the share of the replicas in which it has a gradient.
        has_changed: for each buffer the share of the replicas that have changed it.
    """

    metrics: np.ndarray
    notice: float
    settings: tuple[float, float]
    has_gradient: np.ndarray
    has_changed: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, metrics: int, parameters: int) -> Tail:
        """Return the tail that these values are."""
        kept, first, last = values.copy(), metrics + 3, metrics + 3 + parameters
        notice, word, square = map(float, kept[metrics:first])
        return cls(kept[:metrics], notice, (word, square), kept[first:last], kept[last:])

    @staticmethod
    def size(metrics: int, parameters: int, buffers: int) -> int:
        """Return the number of values in a tail."""
        return metrics + 3 + parameters + buffers


class GradientExchange:
    """An exchange in which all instances compute the means.

    Args:
        is_private: whether the memory of the means may be written; otherwise instances of a host share it.
    """

    def __init__(
        self,
        plan: TorchGradientPlan,
        names: tuple[str, ...],
        communicator: Communicator,
        replicas: int,
        is_private: bool,
    ) -> None:
        self.plan, self.names = plan, names
        self._means = Means(communicator, replicas, plan.quantised)
        self._buckets = plan.buckets(_private if is_private else communicator.allocate)
        self._own_buckets = list(self._buckets)
        self._dtypes = [as_tensor(np.empty(0, parameter.dtype)).dtype for parameter in plan.parameters]
        self._is_alone = replicas == 1 and plan.quantised is None
        self._received = self._views()
        self._converted: dict[int, torch.Tensor] = {}

    def reduce(self, bucket: int, contributions: Sequence[Sequence[np.ndarray]]) -> None:
        """Have the means of a bucket computed from the buffers of the local replicas; collective calls."""
        if self._is_alone:  # the mean of one is what it is
            results = tuple(of_buffer[0] for of_buffer in contributions)
            self._buckets[bucket] = replace(self._buckets[bucket], results=results)
        else:
            self._means.reduce(self._buckets[bucket], contributions)

    def let_go(self) -> None:
        """Give back what the last step has left, which are the gradients themselves where one replica is alone."""
        if self._is_alone:
            self._buckets = list(self._own_buckets)
            self._received = []

    @property
    def tail(self) -> Tail:
        """The numbers that came behind the last bucket."""
        last = self._buckets[-1]
        return Tail.of(last.layout.tail_view(last.results), len(self.names), len(self.plan.parameters))

    def means(self, scale: float) -> list[torch.Tensor]:
        """Return the mean gradients divided by `scale`, in the dtypes of their parameters; valid until the next step.

        Of those that are scattered it is this instance's part.
        """
        if self._is_alone:
            self._received = self._views()
        return [self._mean(number, received, scale) for number, received in enumerate(self._received)]

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Have gradients become their means where they are; None leaves a mean."""
        pairs = [(one, mean) for one, mean in zip(gradients, self._received, strict=True) if one is not None]
        if pairs:
            own, means = zip(*pairs, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(own, means)

    def _views(self) -> list[torch.Tensor]:
        """Return the memory of the means."""
        numbers = range(len(self.plan.parameters))
        return [as_tensor(self.plan.mean(number, self._buckets, self._means.of_payload)) for number in numbers]

    def _mean(self, number: int, received: torch.Tensor, scale: float) -> torch.Tensor:
        dtype = self._dtypes[number]
        if dtype == received.dtype and scale == 1:
            return received
        mean = self._converted.get(number)
        if mean is None:
            mean = self._converted[number] = torch.empty_like(received, dtype=dtype)
        if scale == 1:
            return mean.copy_(received)
        wide = torch.promote_types(received.dtype, torch.float32)
        return mean.copy_(received.to(wide) / scale)


def _private(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape))
    return aligned_empty(size * dtype.itemsize).view(dtype).reshape(shape)
