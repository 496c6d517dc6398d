"""What computes the gradients of a step on the local replicas, as the step sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.exchange.means import Bucket, Means
from strategies.gradients.computation import ReplicaGradients
from strategies.gradients.replica_program import ReplicaProgram, control_words
from strategies.roles import Batch, Gradients
from strategies.train_state import TrainState

Contributions = Sequence[Sequence[np.ndarray]]
"""For each buffer of a bucket the arrays of the local replicas, in their order."""


@dataclass(frozen=True)
class PreparedStep:
    """A step for batches of some shapes.

    Attributes:
        program: what a replica computes.
        gradients: compute it on all local replicas.
        means: where the mean gradients are, as a pytree like the variables that are trained.
        state_means: where the means of leaves of the model state are.
        exchange: has them computed by all instances.
    """

    program: ReplicaProgram
    gradients: ReplicaGradients
    means: Gradients
    state_means: Sequence[np.ndarray]
    exchange: Means


class StepEngine(ABC):
    """Computes gradients on the local replicas, bucket by bucket."""

    @abstractmethod
    def prepare(self, state: TrainState, batch: Batch) -> PreparedStep:
        """What is needed for a step with such a batch; a collective call where it is the first one of its shapes."""

    @abstractmethod
    def begin(self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray) -> None:
        """Begin to compute gradients; does not wait for them.

        Args:
            step: what `prepare` has returned.
            state: not to be used up before all buckets are collected.
            batch: of all local replicas.
            control: see `control_words`.
        """

    @abstractmethod
    def collect(self, step: PreparedStep) -> Iterator[tuple[Bucket, Contributions]]:
        """Each bucket when it is ready."""

    @abstractmethod
    def claim_replicas(self) -> None:
        """Begin anew with the replicas that this instance drives now."""


def control_of(state: TrainState, notice: bool = False) -> np.ndarray:
    """The control words of a step that begins with a state."""
    scale = 1.0 if state.loss_scale is None else float(state.loss_scale.scale)
    return control_words(state.step, notice, scale)
