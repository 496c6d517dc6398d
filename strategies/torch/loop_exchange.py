"""The exchange of the gradients of one module in a loop of the program's own, which is one replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from collectives import Communicator
from strategies.torch.contribution import Contribution
from strategies.torch.gradient_exchange import GradientExchange, Tail, TorchGradientPlan


@dataclass(frozen=True)
class Told:
    """The numbers that a replica tells the others behind its gradients.

    Attributes:
        flags: see `Tail.metrics`.
        settings: see `StepSettings.word`.
        has_gradient: for each parameter whether it has a gradient.
        has_changed: for each buffer whether it has changed.
    """

    flags: tuple[bool, ...]
    settings: int
    has_gradient: tuple[bool, ...]
    has_changed: tuple[bool, ...]

    @property
    def values(self) -> list[float]:
        """The values of the tail; there is no notice."""
        return [*self.flags, 0, self.settings, self.settings**2, *self.has_gradient, *self.has_changed]


class LoopExchange(ABC):
    """An exchange of gradients for one plan: in each step all are taken, then `finish`, then `give`.

    Attributes:
        plan: of the gradients.
    """

    def __init__(self, plan: TorchGradientPlan) -> None:
        self.plan = plan

    @abstractmethod
    def take(self, number: int, gradient: torch.Tensor | None) -> None:
        """Take one gradient while the backward pass runs; see `Contribution.take`."""

    @abstractmethod
    def take_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take all gradients, in their order; see `Contribution.take_all`."""

    @abstractmethod
    def reduce(self, bucket: int) -> None:
        """Exchange a bucket that is not the last one; collective."""

    @abstractmethod
    def finish(self, told: Told) -> Tail:
        """Exchange what is left before the replicas know what they have told each other; collective."""

    @abstractmethod
    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Have gradients become their means where they are; None leaves a mean. Collective.

        Where the tail says that the means are of no use, no instance calls this.
        """


@final
class HostLoopExchange(LoopExchange):
    """An exchange over the communicator, in the memory of the host, to which gradients of a device are copied."""

    def __init__(
        self, plan: TorchGradientPlan, flags: tuple[str, ...], communicator: Communicator, replicas: int
    ) -> None:
        super().__init__(plan)
        self._exchange = GradientExchange(plan, flags, communicator, replicas, is_private=False)
        self._contribution = Contribution(plan)

    def take(self, number: int, gradient: torch.Tensor | None) -> None:
        """See `LoopExchange`."""
        self._contribution.take(number, gradient)

    def take_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See `LoopExchange`."""
        self._contribution.take_all(gradients)

    def reduce(self, bucket: int) -> None:
        """See `LoopExchange`."""
        self._exchange.reduce(self._exchange.buckets[bucket], [[array] for array in self._contribution.arrays(bucket)])

    def finish(self, told: Told) -> Tail:
        """See `LoopExchange`: the numbers travel behind the last bucket."""
        self._contribution.set_tail(told.flags, False, told.settings, told.has_gradient, told.has_changed)
        self.reduce(len(self.plan.members) - 1)
        self._contribution.give_back()
        return self._exchange.tail

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See `LoopExchange`; here it is no collective call."""
        self._exchange.give(gradients)
