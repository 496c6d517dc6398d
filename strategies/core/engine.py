"""The interface between the order of a step and the framework that computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from strategies.core.metrics import UnreadArray
from strategies.core.rows import Begun, EvaluationTask
from strategies.exchange.means import Bucket
from strategies.loss_scaling import LossScale, LossScaling
from strategies.typing import Batch, Gradients, Leaf, Tree

if TYPE_CHECKING:
    from strategies.data.sources import Masked
    from strategies.train_state import TrainState

Buffers: TypeAlias = Sequence[Sequence[Leaf]]
"""For each buffer of a bucket those of the local replicas, in their order.

They lie in the memory of the host or of a device; an engine and its exchange know in which.
"""


class EngineState(Protocol):
    """The state of a training, in the form that its engine uses. The loop reads these two values only."""

    @property
    def step(self) -> int:
        """The number of steps so far."""

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the next loss; None without loss scaling."""


class Exchange(Protocol):
    """The exchange of gradients between instances: by messages, in shared memory, or by a compiled program."""

    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Begin to compute the means of a bucket over all replicas. Collective. `Engine.arrived` returns them."""


class PendingStep(Protocol):
    """A step that has begun."""

    @property
    def buckets(self) -> Iterator[tuple[Bucket, Buffers]]:
        """Each bucket of gradients, as soon as it is ready. The loop reads all of them once, in this order.

        Raises:
            Exception: the error of a replica, once no replica computes any more; the state is unchanged.
        """

    @property
    def exchange(self) -> Exchange:
        """The exchange for these buckets, known when the first one is ready."""


@dataclass(frozen=True)
class Arrived:
    """The results of an exchange.

    Attributes:
        names: the names of the metrics.
        tail: their means over all replicas, float32; other values may follow.
        notice: the share of the replicas whose instances had a notice.
        is_finite: whether the step may be applied; True if gradients are not checked. It may be an unread scalar on a
            device if there is a `scale_after`.
        gradients: returns the mean gradients, and how they are cut into shards, for records.
        scale_after: returns the scale of the next loss by a flag that nobody has read; see `LossScaling.after`.
    """

    names: tuple[str, ...]
    tail: UnreadArray
    notice: float
    is_finite: bool | UnreadArray
    gradients: Callable[[], tuple[Gradients, Tree]]
    scale_after: Callable[[LossScaling, LossScale, UnreadArray], LossScale] = LossScaling.after


State = TypeVar("State", bound=EngineState)
Pending = TypeVar("Pending", bound=PendingStep)


class Engine(ABC, Generic[State, Pending]):
    """A framework that computes steps: it owns the state, and knows nothing of the order in which things happen.

    A state is either replaced by each step, as JAX's pytrees are, or changed in place, as modules of PyTorch are: then
    `update`, `share` and `restore` return the object that they were given. An engine follows the replicas of this
    instance by itself: where an instance was lost, `begin` finds others than before.

    Until `update` is called, an error leaves the state as it was, and the step can be repeated with the same state, on
    the batch of the replicas that the instance drives then. An error of `update` is final.
    """

    @abstractmethod
    def begin(self, state: State, batch: Batch, notice: bool) -> Pending:
        """Begin a step, and do not wait for it. Collective if batches of such shapes are new.

        Args:
            state: the state, which nobody may use up before the step has ended.
            batch: the batch of all local replicas.
            notice: whether this instance was given a notice, which travels with the gradients.

        Raises:
            DisagreementError: on all instances, if they would not compute the same.
        """

    @abstractmethod
    def arrived(self, pending: Pending) -> Arrived:
        """Return the results of the exchange of all buckets. May be collective.

        Raises:
            NonFiniteGradientError: if gradients are checked.
        """

    @abstractmethod
    def update(self, pending: Pending, scale: LossScale | None) -> State:
        """Return the state after the step. If what has arrived is not finite, only the step and the scale change.

        Args:
            pending: the step, whose exchange has arrived.
            scale: the scale of the next loss; None without loss scaling.
        """

    @abstractmethod
    def tell(self, task: EvaluationTask, state: State, batch: Masked) -> Begun:
        """Begin to compute the results of a task for the rows of each local replica, and do not wait for them.

        Collective if the task, or batches of such shapes, are new. The state stays as it is. After an error the engine
        can begin another batch or task. Threads and other resources of tasks end with the engine.

        Args:
            task: the work; engines prepare equal tasks once.
            state: the state, which nobody may use up before the last batch has been waited for.
            batch: the batch of all local replicas: one of a data set of the strategy, or host arrays.

        Raises:
            DisagreementError: on all instances, if they would not compute the same.
            ValueError: here or from `Begun.wait`, if the state was used up; or the batch is for other replicas.
        """

    @abstractmethod
    def share(self, state: State, root: int) -> State:
        """Return the state of rank `root`; parts that only this instance has stay its own. Collective.

        If `root` is lost meanwhile, the state is as it was: no part changes before all parts have arrived.

        Args:
            state: on `root` the state that all get; elsewhere a state with arrays of the same shapes, not read.
            root: the rank whose state is shared.
        """

    @abstractmethod
    def digest(self, state: State) -> Mapping[str, np.ndarray]:
        """Return the arrays that have the same bits on all instances, by name; views where they can be."""

    @abstractmethod
    def snapshot(self, state: State) -> TrainState:
        """Return the state as a `TrainState` of arrays, until the next step: for checkpoints and records."""

    @abstractmethod
    def restore(self, snapshot: TrainState) -> State:
        """Return a state with the arrays of a `TrainState`, of which this instance keeps its part."""
