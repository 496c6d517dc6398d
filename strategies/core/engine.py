"""The interface between the order of a step, an evaluation or a prediction, and the framework that computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from strategies.core.metrics import Layers, UnreadArray
from strategies.errors import SpareError, StrategyError
from strategies.exchange.means import Bucket
from strategies.loss_scaling import LossScale, LossScaling
from strategies.typing import Batch, Gradients, Leaf, Number, Tree

if TYPE_CHECKING:
    from strategies.data.sources import Masked
    from strategies.values import TrainState


class EvaluationTask(ABC):
    """The work on every batch of an evaluation or prediction. An engine prepares equal tasks once.

    An engine runs the task for each replica and batch (JAX compiles it), and calls `host_results` with the result on
    the host. An error of either ends the pass; the state is unchanged.

    Attributes:
        title: The name of the work, for messages.
        is_exact: Whether the task gets only real rows, without padding; these come first in a batch.
    """

    title: ClassVar[str]
    is_exact: ClassVar[bool] = False

    @property
    def code(self) -> Callable[..., Tree]:
        """The function whose code decides the results: the user's, in a field `function`, or the task itself."""
        return getattr(self, "function", self)

    @abstractmethod
    def __call__(self, *arguments: Tree, **named: Tree) -> Tree:
        """Compute the results of a replica for its rows.

        Args:
            arguments: With JAX, traced: `variables, batch, mask, key`, and the model state if there is one. With
                PyTorch: `module, batch`.
            named: Not used.
        """

    @abstractmethod
    def host_results(self, computed: Tree, mask: np.ndarray) -> Tree:
        """Return this replica's results for the other instances, as a pytree of host arrays.

        The arrays have the same structure, shapes and dtypes on all replicas.

        Args:
            computed: The result of `__call__`, on the host.
            mask: Bool `[rows]`, False for padding.
        """

    def sums_of_weights(self, merged: Mapping[str, Tree]) -> Sequence[Number]:
        """Return sums of the weights of all rows, NaN if one is bad; empty if the task knows no weights.

        Args:
            merged: Metrics by name, merged over all rows.
        """
        return ()


@dataclass(frozen=True)
class RowResults:
    """The results of one replica for its rows of a batch.

    Attributes:
        leaves: The arrays of the results, on the host.
        build: Function that makes the tree of the results from its leaves.
        mask: Bool `[rows]`, False for padding.
    """

    leaves: Sequence[np.ndarray]
    build: Callable[[Sequence[np.ndarray]], Tree]
    mask: np.ndarray

    @property
    def tree(self) -> Tree:
        """The results, as `EvaluationTask.host_results` returned them."""
        return self.build(self.leaves)


Results: TypeAlias = Sequence[RowResults]
"""The results of several replicas for a batch, in the order of the replicas."""


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is being computed.

    Attributes:
        wait: Returns the results of the local replicas, or raises the error of one, after all replicas have stopped.
        ahead: Number of further batches that may begin before `wait` of this batch is called.
    """

    wait: Callable[[], Results]
    ahead: int = 0


def padded(rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the real rows, which come first, followed by zeros for padding.

    Args:
        rows: Array `[at least the number of real rows, ...]`.
        mask: Bool, False for padding.
    """
    whole, count = np.zeros((len(mask), *rows.shape[1:]), rows.dtype), int(mask.sum())
    whole[:count] = rows[:count]
    return whole


def in_order(results: Results, is_interleaved: bool) -> Tree:
    """Return the results of all replicas for real rows, in the order of the data set.

    Args:
        results: The results for a batch, one for each row.
        is_interleaved: Whether rows come in rounds of one row per replica; see `EveryRow`.
    """

    def ordered(arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.stack(arrays, axis=1 if is_interleaved else 0)
        return whole.reshape(-1, *arrays[0].shape[1:])

    counts = ordered([one.mask for one in results])
    of_leaves = zip(*(one.leaves for one in results), strict=True)
    return results[0].build([ordered(arrays)[counts] for arrays in of_leaves])


Buffers: TypeAlias = Sequence[Sequence[Leaf]]
"""For each buffer of a bucket, the buffers of the local replicas in their order.

They lie in the memory of the host or of a device, as the engine and its exchange agree.
"""


class EngineState(Protocol):
    """The state of a training in the form that its engine uses. The loop reads only these two values."""

    @property
    def step(self) -> int:
        """The number of steps so far."""

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the next loss; None without loss scaling."""


class Exchange(Protocol):
    """The exchange of gradients between instances: by messages, in shared memory, or by a compiled program.

    The loop calls `reduce` once for each bucket of a step, in the order of the buckets, the same on all instances.
    Then it calls `Engine.finish_exchange`. An error of either ends the step, and the state is unchanged.
    """

    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Begin to compute the means of a bucket over all replicas. Collective. `Engine.finish_exchange` returns them.

        Args:
            bucket: The bucket of gradients.
            contributions: The buffers of the local replicas, which no caller changes before `Engine.finish_exchange`
                returns.
        """


class PendingStep(Protocol):
    """A step that has begun."""

    @property
    def buckets(self) -> Iterator[tuple[Bucket, Buffers]]:
        """Each bucket of gradients, as soon as it is ready. The loop reads all of them once, in this order.

        Raises:
            Exception: The error of a replica, after all replicas have stopped; the state is unchanged.
        """

    @property
    def exchange(self) -> Exchange:
        """The exchange for these buckets, known as soon as the first bucket is ready."""


@dataclass(frozen=True)
class ExchangeResult:
    """The results of an exchange.

    Attributes:
        names: The names of the metrics.
        tail: Their means over all replicas, float32; other values may follow.
        notice: The share of the replicas whose instances had a notice.
        is_finite: Whether the step may be applied; True if gradients are not checked. If there is a `scale_after`, it
            may be an unread scalar on a device.
        gradients: Returns the mean gradients, and how they are cut into shards, for records.
        is_weighted: Whether any weight of a loss is above 0; if not, the step is not applied, and the scale stays.
        scale_after: Returns the scale of the next loss, given an unread `is_finite`; see `LossScaling.after`.
    """

    names: tuple[str, ...]
    tail: UnreadArray
    notice: float
    is_finite: bool | UnreadArray
    gradients: Callable[[], tuple[Gradients, Tree]]
    is_weighted: bool = True
    scale_after: Callable[[LossScaling, LossScale, UnreadArray], LossScale] = LossScaling.after


State = TypeVar("State", bound=EngineState)
Pending = TypeVar("Pending", bound=PendingStep)


class Engine(ABC, Generic[State, Pending]):
    """A framework that computes steps and owns the state. `StepLoop` knows the order of its calls.

    For each step the loop calls `begin`, reads `PendingStep.buckets` to the end, and calls `finish_exchange` and
    `update`. If steps are recorded, it calls `snapshot` before and after `update`. It calls the other methods between
    steps.

    A step either replaces the state, as with JAX's pytrees, or changes it in place, as with PyTorch's modules. In the
    second case `update`, `share` and `restore` return the object that they were given. An engine follows the replicas
    of this instance by itself: after a loss, `begin` may find other replicas than before.

    If an error occurs before `update` is called, the state is unchanged. The step can be repeated with the same state,
    on the batch of the replicas that the instance drives then. An error of `update` is final.

    Attributes:
        can_keep_copies: Whether `has_copies` is True in a job that was started to go on without lost instances.
    """

    can_keep_copies = False

    @abstractmethod
    def begin(self, state: State, batch: Batch, notice: bool) -> Pending:
        """Begin a step without waiting for it. Collective if batches of these shapes are new.

        Args:
            state: The state, which no caller may use up before the step has ended.
            batch: The batch of all local replicas.
            notice: Whether this instance was given a notice, which travels with the gradients.

        Raises:
            DisagreementError: On all instances, if they would not compute the same.
        """

    @abstractmethod
    def finish_exchange(self, pending: Pending) -> ExchangeResult:
        """Return the results of the exchange of all buckets. May be collective.

        Raises:
            NonFiniteGradientError: If gradients are checked, and one is not finite.
            WeightError: If losses have weights, and their sum has no mean; see `is_weighted`.
        """

    @abstractmethod
    def update(self, pending: Pending, scale: LossScale | None) -> State:
        """Return the state after the step. If it may not be applied, only the step and the scale change.

        Args:
            pending: The step, whose exchange has arrived.
            scale: The scale of the next loss; None without loss scaling.
        """

    @abstractmethod
    def begin_task(self, task: EvaluationTask, state: State, batch: Masked) -> PendingBatch:
        """Begin to compute the results of a task for the rows of each local replica, without waiting for them.

        Collective if the task, or batches of these shapes, are new. The state stays as it is. After an error the engine
        can begin another batch or task. Threads and other resources of tasks end with the engine.

        Args:
            task: The work; an engine prepares equal tasks once.
            state: The state, which no caller may use up before the results of the last batch are there.
            batch: The batch of all local replicas: a batch of a data set of the strategy, or host arrays.

        Raises:
            DisagreementError: On all instances, if they would not compute the same.
            ValueError: Here or from `PendingBatch.wait`, if the state was used up, or the batch is for other replicas.
        """

    @abstractmethod
    def share(self, state: State, root: int) -> State:
        """Return the state of rank `root`; parts that only this instance has stay its own. Collective.

        If `root` is lost meanwhile, the state is unchanged: no part changes before all parts have arrived.

        Args:
            state: On `root`, the state that all get; elsewhere a state with arrays of the same shapes, not read.
            root: The rank whose state is shared.
        """

    def has_copies(self, state: State | None = None) -> bool:
        """Return whether another instance has a copy of every part of the state that is only here.

        Args:
            state: The state; None for any state that this engine makes.
        """
        return False

    def completed(self) -> State:
        """Return the state after the interrupted step, if an instance has used up the state before it. Collective.

        An instance may use up parts of the state only when all others can complete the step. It then sets
        `InstanceProgress.is_past`.
        """
        raise AssertionError("no instance uses up parts of the state before the step is complete")

    def fitted(self, state: State) -> State:
        """Return the state with parts for the present replicas. Collective once after each change of the instances.

        Args:
            state: The state, of the same step on all instances.

        Raises:
            LostPartError: On all instances, if a part was lost with its copy.
        """
        return state

    @abstractmethod
    def digest(self, state: State) -> Mapping[str, np.ndarray]:
        """Return the arrays that must have the same bits on all instances, by name; views if possible."""

    # ---- for sinks of metrics; an engine without these methods works without norms, histograms and learning rates

    def layers(self, state: State, pending: Pending, result: ExchangeResult) -> Layers:
        """Return the trained variables of a step and their mean gradients, before `update`.

        Args:
            state: The state before the step.
            pending: The step, whose exchange has arrived.
            result: The results of the exchange.
        """
        raise StrategyError(f"{type(self).__name__} does not show its layers; ask for no norms and no histograms")

    def learning_rates(self, state: State, steps: int) -> Callable[[int], Mapping[str, float]] | None:
        """Return a function that reads the learning rates of steps by name; None if they are not known.

        The function waits for them. Its argument is how many of the steps came later; it may know only those of the
        last step, and then returns nothing for the others.

        Args:
            state: The state after the steps, which the next step may use up.
            steps: Number of steps that one program has made.
        """
        return None

    # ---- spares; an engine without these methods works in jobs without spares

    def placeholder_state(self, state: State, step: int, wait: Callable[[], None]) -> State:
        """Return the state of a step on a spare, without values.

        Args:
            state: A state with arrays of the same shapes, or without values.
            step: The number of steps so far.
            wait: Function that waits for the values; see `Placeholder`.
        """
        raise SpareError(f"a spare cannot follow the steps of {type(self).__name__}")

    def read(self, state: State) -> State:
        """Return a state with the values that this instance has got when it became active; otherwise the state."""
        return state

    def fill(self, state: State, values: State) -> None:
        """Fill a state that `placeholder_state` has returned with the values of `values`."""

    def hand_over(self, state: State, root: int, joins: bool) -> State:
        """Return the state of rank `root` on instances that join, and the own state on others. Collective.

        Args:
            state: The state; on instances that join without values.
            root: The rank whose state is handed over; it does not join.
            joins: Whether this instance joins.
        """
        raise SpareError(f"{type(self).__name__} cannot hand a state over")

    def rehearse(self, state: State, batch: Batch) -> None:
        """Compute a step on a spare, so that everything is compiled, and free the memory of gradients.

        Args:
            state: A state with values, which is used up.
            batch: A batch with values.
        """

    @property
    def facts(self) -> Mapping[str, object]:
        """Further facts that must be equal on an instance that joins, for JSON; missing ones are not compared."""
        return {}

    # ---- checkpoints

    @abstractmethod
    def snapshot(self, state: State) -> TrainState:
        """Return the state, for checkpoints and records, as a `TrainState` of arrays that the next step may reuse."""

    @abstractmethod
    def restore(self, snapshot: TrainState) -> State:
        """Return a state from a `TrainState`; of sharded arrays this instance keeps its part."""
