"""What one replica computes of a batch where nothing is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from strategies.data.sources import Masked
from strategies.evaluation.data_pass import Mean, Mergeable, Told
from strategies.gradients.arguments import Outcome, metric_names, naming_missing_keys
from strategies.gradients.model_state import PER_REPLICA
from strategies.programs.captures import Reads
from strategies.replicas.devices import borrow, is_key
from strategies.replicas.replica_context import replica_context
from strategies.replicas.replicas import Replicas
from strategies.step.options import StepOptions
from strategies.train_state import TrainState
from strategies.typing import Batch, Function, Key, LossFunction, Tree, Variables

MetricsFunction = Callable[..., Mapping[str, Mergeable]]


class EvaluationTask(ABC):
    """The work on every batch of an evaluation or prediction. Equal tasks are compiled once.

    Attributes:
        title: what is done, for messages.
        is_of_rows: whether each row is alone in it, so that replicas cannot meet.
        is_exact: whether it gets the rows that count and no others, in a program for their number. They come first.
    """

    title: ClassVar[str]
    is_of_rows: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """What a replica computes of its rows; traceable. The model state comes where there is one."""

    @abstractmethod
    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """Return this replica's results for the other instances, as a pytree of host arrays.

        Args:
            computed: host arrays; of an exact task where no row counts zeros instead, as for a whole batch.
            mask: bool `[rows]`, False for rows that do not count.
        """


@dataclass(frozen=True)
class LossOfRows(EvaluationTask):
    """The loss and the metrics of each row, as a batch of one: however many rows count, their mean is over rows."""

    title: ClassVar[str] = "evaluation"
    is_of_rows: ClassVar[bool] = True
    function: LossFunction

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """See `EvaluationTask`: float32 `[rows]` by the names of the metrics."""

        def of_row(row: Tree) -> dict[str, jax.Array]:
            alone = jax.tree.map(lambda leaf: leaf[None], row)
            return _scalars(Outcome.of(self.function(variables, alone, key, *model_state)))

        return jax.vmap(of_row)(batch)

    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """See `EvaluationTask`: a `Mean` for each name, added row by row."""
        return {name: Mean(_sum(values[mask]), np.float64(mask.sum())) for name, values in computed.items()}


@dataclass(frozen=True)
class MetricsOfBatch(EvaluationTask):
    """Metrics that a function of the user's makes of a whole batch, and of its mask."""

    title: ClassVar[str] = "evaluation"
    function: MetricsFunction

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """See `EvaluationTask`."""
        metrics = self.function(variables, batch, mask, key, *model_state)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics_fn returns a {type(metrics).__name__}; it must return a dictionary of metrics")
        for name, metric in metrics.items():
            is_tree = not jax.tree_util.all_leaves([metric])
            if not callable(getattr(metric, "merge", None)) or not is_tree:
                raise TypeError(
                    f"metric {name!r} of metrics_fn is a {type(metric).__name__}; batches have different numbers of "
                    "rows, so return a strategies.Mean(total, count), or a pytree with a method merge(other)"
                )
        return dict(metrics)

    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """See `EvaluationTask`."""
        return {name: one.widened() if isinstance(one, Mean) else one for name, one in computed.items()}


@dataclass(frozen=True)
class RowOutputs(EvaluationTask):
    """What the model says of each row.

    Attributes:
        function: returns an `Outcome` that has it, or the outputs themselves.
        is_loss: whether it is the loss function, which has to return an `Outcome`.
    """

    title: ClassVar[str] = "prediction"
    function: Function
    is_loss: bool

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """See `EvaluationTask`."""
        returned = self.function(variables, batch, key, *model_state)
        if self.is_loss or isinstance(returned, Outcome):
            returned = Outcome.of(returned).outputs
        leaves = jax.tree_util.tree_leaves_with_path(returned)
        if not leaves:
            which = "the loss function" if self.is_loss else "fn"
            raise ValueError(
                f"{which} returns no outputs to predict; return a strategies.Outcome(loss, outputs=...), or give "
                "predict a function fn(variables, batch, key) that returns them"
            )
        for path, leaf in leaves:
            name = f"outputs{jax.tree_util.keystr(path)}"
            if is_key(leaf):
                raise TypeError(f"{name} is a random key; return jax.random.key_data of it")
            if jnp.shape(leaf)[:1] != mask.shape:
                raise ValueError(
                    f"{name} is of shape {list(jnp.shape(leaf))} for {mask.shape[0]} rows; the first axis of outputs "
                    "is the rows of the batch: leave out what belongs to no row"
                )
        return jax.tree.map(jnp.asarray, returned)

    def told(self, computed: Tree, mask: np.ndarray) -> Tree:
        """See `EvaluationTask`."""
        return computed


class EvaluationProgram:
    """A task, compiled for variables and batches of some shapes.

    The key that functions get is `jax.random.key(seed)`, for every row, batch and replica.

    Attributes:
        equations: what is computed.
        is_independent: whether it may run on other instances and replicas: it has no collectives.

    Raises:
        ValueError: if the function has feeds, or collectives where each row is alone; or see `EvaluationTask`.
        TypeError: see `EvaluationTask`.
    """

    def __init__(
        self, replicas: Replicas, task: EvaluationTask, options: StepOptions, state: TrainState, rows: Masked
    ) -> None:
        self._replicas = replicas
        self._task = task
        self._options = options
        self._devices = replicas.devices
        self._program = replicas.devices.compile(self._of_replica)
        self._executables: dict[tuple[jax.Device, int], Function] = {}
        self._has_feeds = False
        self.is_independent = True
        variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.variables)
        self._shapes = np.int32(0), variables, *rows, options.shapes_of_replica(state.model_state)
        self._reads = Reads(getattr(task, "function", task))
        with naming_missing_keys(variables, rows.values):
            self.equations: core.ClosedJaxpr = self._program.equations(*self._shapes)
        self._reads.settle()
        shapes = self._program.results(*self._shapes)
        self._nothing = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
        if self._has_feeds:
            raise ValueError(f"the function of the {task.title} has feeds, which are for training; give one without")
        if task.is_of_rows and not self.is_independent:
            raise ValueError(
                "the loss function has collectives, and evaluate gives it each row alone; give evaluate a metrics_fn, "
                "which sees a whole batch, or a function fn without collectives"
            )

    def fits(self, replicas: Replicas) -> bool:
        """Return whether this instance drives the same replicas, and nothing that the program reads has changed."""
        return (self.is_independent or replicas.devices is self._devices) and self._reads.is_same()

    def begin(self, state: TrainState, batch: Masked) -> Callable[[], Told]:
        """Begin to compute; does not wait.

        Returns:
            A function that waits, and returns what each local replica tells, and its mask.
        """
        replicas, devices = self._replicas, self._replicas.devices
        parts, masks = devices.parts(batch.values), [np.asarray(mask) for mask in devices.parts(batch.mask)]
        rule = self._options.rule_of(state.model_state)
        shared = devices.share((state.variables, rule.map_own(lambda leaf: None, state.model_state)))
        own = devices.parts(rule.pick(state.model_state, PER_REPLICA))
        positions = range(len(devices.replicas))
        counts = [int(mask.sum()) if self._task.is_exact else len(mask) for mask in masks]
        executables = [self._compiled(devices.device_of(place), counts[place]) for place in positions]

        def compute(position: int) -> Tree:
            variables, model_state = shared[position % len(shared)]
            model_state = rule.with_own(model_state, [one[0] for one in own[position]])
            index = np.int32(devices.replicas[position])
            rows, mask = _first(counts[position], (parts[position], masks[position]))
            return executables[position](index, variables, rows, mask, model_state)

        replicas.reducer.begin()
        if len(positions) == 1:
            computed = [compute(0)]
            return lambda: self._told(computed, masks)
        futures = devices.begin(lambda position: jax.block_until_ready(compute(position)), replicas.reducer.fail)

        def wait_for_all() -> Told:
            errors = [future.exception() for future in futures]
            for error in errors:
                if error is not None:
                    raise error
            return self._told([future.result() for future in futures], masks)

        return wait_for_all

    def _told(self, computed: Sequence[Tree], masks: Sequence[np.ndarray]) -> Told:
        hosted = [jax.tree.map(np.asarray, of_replica) for of_replica in computed]
        return [(self._task.told(values, mask), mask) for values, mask in zip(hosted, masks, strict=True)]

    def _compiled(self, device: jax.Device, rows: int) -> Function:
        """The program for so many rows; for none of them one that returns zeros."""
        if rows == 0:
            return lambda *arguments: self._nothing
        if (device, rows) not in self._executables:
            index, variables, values, mask, state = self._shapes
            values, mask = jax.tree.map(lambda one: _with_rows(one, rows), (values, mask))
            self._executables[device, rows] = self._program.compiled(device, index, variables, values, mask, state)
        return self._executables[device, rows]

    def _of_replica(
        self, index: jax.Array, variables: Variables, batch: Batch, mask: jax.Array, model_state: Tree
    ) -> Tree:
        key = jax.random.key(self._options.seed)
        cast = self._options.precision.cast
        context = self._replicas.new_context(index, self._task.title)
        with replica_context(context):
            given = () if model_state is None else (model_state,)
            computed = self._task(cast(variables), cast(batch), mask, key, *given)
        self.is_independent &= context.is_independent
        self._has_feeds |= context.has_feeds
        return computed


def _with_rows(shape: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)


def _first(rows: int, tree: Tree) -> Tree:
    """The first rows of what a replica gets."""
    return jax.tree.map(lambda leaf: leaf if len(leaf) == rows else borrow(leaf)[:rows], tree)


def _scalars(outcome: Outcome) -> dict[str, jax.Array]:
    """The loss and the metrics of one row, in float32.

    Raises:
        TypeError: if they are no scalars.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), outcome.metrics)
    names = metric_names(shapes)
    if jnp.shape(outcome.loss) != ():
        raise TypeError(
            f"the loss of a batch of one row is of shape {list(jnp.shape(outcome.loss))}; it must be a scalar: take "
            "jnp.mean of it"
        )
    values = {"loss": outcome.loss, **{name: outcome.metrics[name] for name in names}}
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def _sum(values: np.ndarray) -> np.float64:
    """Their sum in float64, one after another: `np.sum` adds in an order that is NumPy's own affair."""
    total: np.float64 = np.add.accumulate(values, dtype=np.float64)[-1] if values.size else np.float64(0)
    return total
