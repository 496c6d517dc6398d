"""Checkpoints for programs with their own training loop."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from strategies.core.journal import Recorded
from strategies.core.metrics import StepNotice
from strategies.core.survival import together
from strategies.placeholders import packed
from strategies.strategy import Strategy
from strategies.train_state import TrainState


class Loop(Protocol):
    """The loop whose steps are saved: a `Trainer` or an `OwnLoop`.

    The gradients of a Trainer's step carry the notice. `Checkpoints` calls `share_notice` only on an `OwnLoop`, so a
    loop whose steps carry no notice must be an `OwnLoop` or a subclass.

    Attributes:
        seed: Seed of the random numbers; a checkpoint with another seed is refused.
    """

    seed: int

    @property
    def notice(self) -> StepNotice:
        """The notice that the instances share with every step."""

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas train."""

    @property
    def is_sharded(self) -> bool:
        """Whether instances hold different parts of the state."""

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` for each array that this instance holds only in part."""


class OwnLoop:
    """A replacement of the `Trainer` in `Checkpoints`, for programs that make their steps themselves.

    Every instance has the whole state, and all have the same. `Checkpoints.after_step` is a collective call here: the
    instances tell each other whether one of them was asked to leave.

    Example::

        loop = strategies.OwnLoop(strategy, seed=0)
        with strategies.Checkpoints("folder", loop, every=100) as checkpoints:
            state = checkpoints.restore(strategies.TrainState(variables, optimizer_state, step=0))
            while state.step < 1000:
                variables, optimizer_state = my_step(state.variables, state.optimizer_state)
                state = strategies.TrainState(variables, optimizer_state, state.step + 1)
                checkpoints.after_step(state)

    Args:
        strategy: Strategy whose replicas train.
        seed: Seed of the program's random numbers.
    """

    is_sharded = False

    def __init__(self, strategy: Strategy, seed: int = 0) -> None:
        self.strategy = strategy
        self.seed = seed
        self.notice = StepNotice()

    def whole(self, state: TrainState) -> TrainState:
        """Return the state itself: every instance has all of it."""
        return state

    def share_notice(self) -> None:
        """Share the notice of any instance with all instances. Collective, and repeated if an instance is lost."""
        replicas = self.strategy.replicas

        def ask() -> np.ndarray:
            return replicas.communicator.all_reduce(given(), "max", name="notice")

        def given() -> np.ndarray:
            return np.array([self.notice.is_given], np.float32)

        def share(found: np.ndarray, root: int) -> np.ndarray:
            return replicas.communicator.broadcast(found.copy(), root, name="notice")

        found = together(replicas, ask, share, given, Recorded[np.ndarray]("notice", packed, np.array))
        self.notice.agree(float(found[0]))
