"""Checkpoints for programs that make their steps themselves."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from strategies.core.metrics import StepNotice
from strategies.strategy import Strategy
from strategies.train_state import TrainState


class Loop(Protocol):
    """The maker of the steps that are saved: a `Trainer`, or an `OwnLoop`.

    The gradients of a Trainer's step carry the notice. `Checkpoints` calls `share_notice` of an `OwnLoop`, and of no
    other class: a loop that carries no notice with its steps is an `OwnLoop`, or derived from it.

    Attributes:
        seed: of the random numbers; a checkpoint of another one is refused.
        notice: what the instances tell each other.
    """

    seed: int
    notice: StepNotice

    @property
    def strategy(self) -> Strategy:
        """Where the replicas are."""

    @property
    def is_sharded(self) -> bool:
        """Whether instances have different parts of the state."""

    def whole(self, state: TrainState) -> TrainState:
        """The state with a `PartOfArray` wherever this instance has only a part of an array."""


class OwnLoop:
    """Stands for the `Trainer` in `Checkpoints` where the program makes its steps itself.

        loop = strategies.OwnLoop(strategy, seed=0)
        with strategies.Checkpoints("folder", loop, every=100) as checkpoints:
            state = checkpoints.restore(strategies.TrainState(variables, optimizer_state, step=0))
            while state.step < 1000:
                variables, optimizer_state = my_step(state.variables, state.optimizer_state)
                state = strategies.TrainState(variables, optimizer_state, state.step + 1)
                checkpoints.after_step(state)

    Every instance has the whole state, the same on all. `Checkpoints.after_step` is a collective call here: the
    instances tell each other whether one of them was told to leave.

    Args:
        strategy: where the replicas are.
        seed: of the program's random numbers.
    """

    is_sharded = False

    def __init__(self, strategy: Strategy, seed: int = 0) -> None:
        self.strategy = strategy
        self.seed = seed
        self.notice = StepNotice()

    def whole(self, state: TrainState) -> TrainState:
        """The state: every instance has all of it."""
        return state

    def share_notice(self) -> None:
        """Have all instances know what one of them was told; a collective call."""
        given = np.array([self.notice.is_given], np.float32)
        self.notice.agree(float(self.strategy.communicator.all_reduce(given, "max", name="notice")[0]))
