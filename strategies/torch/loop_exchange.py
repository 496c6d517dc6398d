"""The exchange of gradients between training loops of programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from strategies.torch.contribution import Contribution
from strategies.torch.gradient_exchange import GradientExchange, Tail, TorchGradientPlan
from strategies.torch.tensors import real_views


@dataclass(frozen=True)
class Told:
    """The numbers that a replica sends to the others behind its gradients.

    Attributes:
        flags: The numbers that travel in place of metrics.
        settings: The hash of the settings, see `StepSettings.word`.
        has_gradient: For each parameter, whether it has a gradient.
        has_changed: For each buffer, whether it has changed.
    """

    flags: tuple[float, ...]
    settings: int
    has_gradient: tuple[bool, ...]
    has_changed: Sequence[float]

    @property
    def values(self) -> list[float]:
        """The values of the tail, with 0 for the notice, which loops do not have."""
        return [*self.flags, 0, self.settings, self.settings**2, *self.has_gradient, *self.has_changed]


class LoopExchange(ABC):
    """An exchange of gradients for one plan.

    In each step a loop takes all gradients, one by one or together, then calls `finish`, then `give`. It may call
    `reduce` for a bucket whose gradients were taken. If a call raises, `backward()` raises, and the step has no means.
    A loop with several local replicas takes the gradients of each, in their order.

    Attributes:
        plan: The plan of the gradients.
    """

    def __init__(self, plan: TorchGradientPlan) -> None:
        self.plan = plan

    @abstractmethod
    def take(self, number: int, gradient: torch.Tensor | None) -> None:
        """Take one gradient while the backward pass runs, None for zeros. The caller must not change it any more."""

    @abstractmethod
    def take_all(self, gradients: Sequence[torch.Tensor | None], place: int = 0) -> None:
        """Take all gradients of a local replica, in the order of the parameters, None for zeros.

        Args:
            gradients: The gradients.
            place: The place of the replica among the local replicas.
        """

    @abstractmethod
    def reduce(self, bucket: int) -> None:
        """Exchange a bucket other than the last one. Collective."""

    @abstractmethod
    def finish(self, told: Sequence[Told]) -> Tail:
        """Exchange the last bucket and the numbers of each local replica, and return their means. Collective."""

    @abstractmethod
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replace each gradient of the first local replica by its mean, in place; None leaves out a mean. Collective.

        If the tail shows that the means cannot be used, no instance calls `give`.
        """


@final
class HostLoopExchange(LoopExchange):
    """An exchange over the communicator, in host memory. Gradients of a device are copied there.

    Means are written over large gradients, but not before the tail shows that the means can be used: if an instance has
    another plan, all exchange the same gradients again. Gradients that leave earlier are not written over.

    Args:
        plan: The plan of the gradients.
        flags: The names of the numbers that travel in place of metrics.
        communicator: The communicator of all instances.
        replicas: The number of replicas of all instances.
        local: The number of local replicas.
    """

    def __init__(
        self, plan: TorchGradientPlan, flags: tuple[str, ...], communicator: Communicator, replicas: int, local: int
    ) -> None:
        super().__init__(plan)
        self._exchange = GradientExchange(
            plan, flags, communicator, replicas, communicator.allocate, writes_over=not plan.is_cut
        )
        self._contributions = [Contribution(plan) for _ in range(local)]
        self._last = len(plan.members) - 1

    @override
    def take(self, number: int, gradient: torch.Tensor | None) -> None:
        [real] = real_views([gradient])
        self._contributions[0].take(number, real)

    @override
    def take_all(self, gradients: Sequence[torch.Tensor | None], place: int = 0) -> None:
        self._contributions[place].take_all(real_views(gradients))

    @override
    def reduce(self, bucket: int) -> None:
        self._exchange.reduce(self._exchange.buckets[bucket], self._taken(bucket))

    @override
    def finish(self, told: Sequence[Told]) -> Tail:
        """Exchange the last bucket, with the numbers behind it, except what is written over gradients."""
        for contribution, own in zip(self._contributions, told, strict=True):
            contribution.set_tail(own.flags, False, own.settings, own.has_gradient, own.has_changed)
        self._exchange.reduce_kept(self._last, self._taken(self._last))
        return self._exchange.tail

    @override
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._exchange.reduce_over(self._last, self._taken(self._last))
        others = real_views(gradients)
        for number in self._contributions[0].borrowed:
            own = others[number]
            if own is not None and self._exchange.is_over(number):
                torch.autograd.graph.increment_version(own)
                others[number] = None
        self._exchange.give(others)
        self._exchange.let_go()
        for contribution in self._contributions:
            contribution.give_back()

    def _taken(self, bucket: int) -> list[list[np.ndarray]]:
        arrays = [contribution.arrays(bucket) for contribution in self._contributions]
        return [list(of_buffer) for of_buffer in zip(*arrays, strict=True)]
