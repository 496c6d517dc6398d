"""The tasks of evaluations and predictions on JAX, and one program per replica and batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from typing_extensions import override

from strategies.core.agreement import insist_on_agreement
from strategies.core.engine import EvaluationTask, PendingBatch, Results
from strategies.core.evaluation import Mergeable
from strategies.data.sources import Masked
from strategies.jax.comparing.agreement import lines_of, terms_of
from strategies.jax.evaluation.mean import Mean
from strategies.jax.gradients.computation import (
    MODEL_STATE,
    check_function,
    check_loss_function,
    check_takes_state,
    check_weight,
    metric_names,
    naming_missing_keys,
)
from strategies.jax.gradients.model_state import PER_REPLICA, travelling
from strategies.jax.options import StepOptions
from strategies.jax.programs.captures import CapturedValues
from strategies.jax.programs.compilation import key_of, shapes_of
from strategies.jax.replicas.devices import borrow, is_key, results_of
from strategies.jax.replicas.replica_context import replica_context
from strategies.jax.replicas.replicas import Replicas, row_results
from strategies.jax.replicas.sharding import replication_of
from strategies.typing import Batch, Function, Key, LossFunction, Number, Tree, Variables
from strategies.values import Outcome, TrainState, check_state

MetricsFunction = Callable[..., Mapping[str, Mergeable]]


def evaluation_task(
    loss_fn: LossFunction, fn: LossFunction | None, metrics_fn: MetricsFunction | None, has_state: bool
) -> EvaluationTask:
    """Return the task of `Trainer.evaluate`.

    Args:
        loss_fn: Loss function of the Trainer.
        fn: Function used instead of the loss function, or None.
        metrics_fn: Function that makes metrics of a whole batch, or None.
        has_state: Whether there is a model state.

    Raises:
        ValueError: Both `fn` and `metrics_fn` are given.
    """
    if fn is not None and metrics_fn is not None:
        raise ValueError("evaluate got both fn and metrics_fn; give only one of them")
    if metrics_fn is not None:
        arguments = ("variables", "batch", "mask", "key")
        check_function("metrics_fn", metrics_fn, (*arguments, MODEL_STATE) if has_state else arguments)
        return MetricsOfBatch(metrics_fn)
    _check(fn, has_state)
    return LossOfRows(fn or loss_fn)


def prediction_task(loss_fn: LossFunction, fn: Function | None, has_state: bool) -> EvaluationTask:
    """Return the task of `Trainer.predict`.

    Args:
        loss_fn: Loss function of the Trainer, which returns outputs.
        fn: Function used instead of the loss function, or None.
        has_state: Whether there is a model state.
    """
    _check(fn, has_state)
    return RowOutputs(fn or loss_fn, is_loss=fn is None)


def _check(fn: Function | None, has_state: bool) -> None:
    if fn is not None:
        check_loss_function(fn)
        check_takes_state(fn, has_state, "fn")


@dataclass(frozen=True)
class LossOfRows(EvaluationTask):
    """The loss and the metrics of each row, computed as a batch of one row, and their means over rows.

    If the function gives a weight for each row, the means are weighted.
    """

    title: ClassVar[str] = "evaluation"
    function: LossFunction

    @override
    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        """Return float32 `[rows]` by the names of the metrics, and the weights float32 `[rows]`, or None."""

        def of_row(row: Tree) -> tuple[dict[str, jax.Array], jax.Array | None]:
            alone = jax.tree.map(lambda leaf: leaf[None], row)
            outcome = Outcome.of(self.function(variables, alone, key, *model_state))
            return _scalars(outcome), _weight(outcome)

        return jax.vmap(of_row)(batch)

    @override
    def host_results(self, computed: Tree, mask: np.ndarray) -> Tree:
        """Return a `Mean` for each name, added row by row."""
        values_of, weights = computed
        weights = np.ones(mask.sum()) if weights is None else weights[mask].astype(np.float64)
        count = _sum(weights)
        return {
            name: Mean(_sum(np.where(weights > 0, values[mask], 0) * weights), count)
            for name, values in values_of.items()
        }

    @override
    def sums_of_weights(self, merged: Mapping[str, Tree]) -> Sequence[Number]:
        return [mean.count for mean in merged.values()]


@dataclass(frozen=True)
class MetricsOfBatch(EvaluationTask):
    """The metrics that a user's function makes of a whole batch and its mask."""

    title: ClassVar[str] = "evaluation"
    function: MetricsFunction

    @override
    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
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

    @override
    def host_results(self, computed: Tree, mask: np.ndarray) -> Tree:
        return {name: one.widened() if isinstance(one, Mean) else one for name, one in computed.items()}


@dataclass(frozen=True)
class RowOutputs(EvaluationTask):
    """The outputs of the model for each row.

    Attributes:
        function: Function that returns the outputs, or an `Outcome` with them.
        is_loss: Whether it is the loss function, which must return an `Outcome`.
    """

    title: ClassVar[str] = "prediction"
    function: Function
    is_loss: bool

    @override
    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, *model_state: Tree) -> Tree:
        returned = self.function(variables, batch, key, *model_state)
        if self.is_loss or isinstance(returned, Outcome):
            returned = Outcome.of(returned).outputs
        leaves = jax.tree_util.tree_leaves_with_path(returned)
        if not leaves:
            which = "the loss function" if self.is_loss else "fn"
            raise ValueError(
                f"{which} returns no outputs to predict; return a strategies.Outcome(loss, outputs=...), or give "
                "predict a function fn(variables, batch, key) that returns outputs"
            )
        for path, leaf in leaves:
            name = f"outputs{jax.tree_util.keystr(path)}"
            if is_key(leaf):
                raise TypeError(f"{name} is a random key, which is not an array; return jax.random.key_data of it")
            if jnp.shape(leaf)[:1] != mask.shape:
                raise ValueError(
                    f"{name} is of shape {list(jnp.shape(leaf))} for {mask.shape[0]} rows; outputs need the rows of "
                    "the batch as their first axis: leave out values that belong to no row"
                )
        return jax.tree.map(jnp.asarray, returned)

    @override
    def host_results(self, computed: Tree, mask: np.ndarray) -> Tree:
        return computed


def _scalars(outcome: Outcome) -> dict[str, jax.Array]:
    """Return the loss and the metrics of one row as float32; raise TypeError if one is not a scalar."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), outcome.metrics)
    names = metric_names(shapes)
    if jnp.shape(outcome.loss) != ():
        raise TypeError(
            f"the loss of a batch of one row is of shape {list(jnp.shape(outcome.loss))}, but must be a scalar; take "
            "jnp.mean of it"
        )
    values = {"loss": outcome.loss, **{name: outcome.metrics[name] for name in names}}
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def _weight(outcome: Outcome) -> jax.Array | None:
    """Return the weight of one row as it travels, or None; raise TypeError if it is not a scalar."""
    if outcome.weight is None:
        return None
    check_weight(jax.ShapeDtypeStruct(jnp.shape(outcome.weight), jnp.result_type(outcome.weight)))
    return travelling(outcome.weight)


def _sum(values: np.ndarray) -> np.float64:
    """Return the sum in float64, added one after another, because the order of `np.sum` depends on the length."""
    return np.add.accumulate(values, dtype=np.float64)[-1] if values.size else np.float64(0)


# ---- programs

AHEAD = 2
"""The number of batches that may have begun before the results of the first of them are read."""


@final
class JaxRows:
    """The engine's evaluation of tasks, by one program per task and shapes of batches.

    Args:
        replicas: Places of the replicas.
        options: Options of the step.
        is_recorded: Whether every step is recorded; then `poprun verify` compares instances instead.
    """

    def __init__(self, replicas: Replicas, options: StepOptions, is_recorded: bool) -> None:
        self._replicas = replicas
        self._devices = replicas.devices
        self._options = options
        self._is_recorded = is_recorded
        self._programs: dict[Hashable, EvaluationProgram] = {}
        self._agreed: set[Hashable] = set()  # keys of programs that the present instances have compared

    def begin_task(self, task: EvaluationTask, state: TrainState, batch: Masked) -> PendingBatch:
        """Begin a batch of a task, as `Engine.begin_task` describes."""
        check_state(state)
        if all(replication_of(leaf) is None for leaf in jax.tree.leaves(batch.values)):
            batch = self._replicas.sharding.batch(batch)
        program = self._program(task, state, batch)
        begun = program.begin(state, batch)

        def wait() -> Results:
            try:
                with self._replicas.reducer.ending():  # errors of collectives in the function are raised here
                    return begun()
            finally:
                check_state(state)  # a step that used up the state meanwhile is the first error to report

        # Replicas with collectives run one batch at a time.
        return PendingBatch(wait, AHEAD if program.is_independent else 0)

    def _program(self, task: EvaluationTask, state: TrainState, batch: Masked) -> EvaluationProgram:
        """Return the program for batches of this shape. Collective if the shape is new."""
        replicas = self._replicas
        if self._devices is not replicas.devices:  # an instance was lost
            self._devices = replicas.devices
            self._agreed.clear()
        replicas.sharding.check_batch(batch)
        of_one = jax.tree.map(replicas.devices.replica_shape, batch)
        model_state = self._options.shapes_of_replica(state.model_state)
        key = task, key_of((state.variables, model_state, of_one))
        found = self._programs.get(key)
        if found is None or not found.fits(replicas):
            self._agreed.discard(key)
            found = self._programs[key] = EvaluationProgram(replicas, task, self._options, state, of_one)
        if key not in self._agreed and replicas.communicator.size > 1 and not self._is_recorded:
            programs = {f"the {task.title}": lines_of(found.equations)}
            options = {"seed": self._options.seed, "step": state.step}
            terms = terms_of(options, replicas.dataset_of(batch), of_one, programs, None)
            insist_on_agreement(replicas, terms)
        self._agreed.add(key)
        return found


class EvaluationProgram:
    """A task, compiled for variables and batches of some shapes.

    Functions get the key `jax.random.key(seed)` for every row, batch and replica.

    Attributes:
        equations: Computation of the program, for comparisons.
        is_independent: Whether it has no collectives, and so may run on other instances and replicas.

    Raises:
        ValueError: The function has feeds, or collectives although each row is evaluated alone; or see
            `EvaluationTask`.
        TypeError: See `EvaluationTask`.
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
        variables = shapes_of(state.variables)
        self._shapes = np.int32(0), variables, *rows, options.shapes_of_replica(state.model_state)
        self._reads = CapturedValues(task.code)
        with naming_missing_keys(variables, rows.values):
            self.equations: core.ClosedJaxpr = self._program.equations(*self._shapes)
        self._reads.settle()
        shapes = self._program.results(*self._shapes)
        self._nothing = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
        if self._has_feeds:
            raise ValueError(f"the function of the {task.title} has feeds, which only training has; use one without")
        if isinstance(task, LossOfRows) and not self.is_independent:
            raise ValueError(
                "the loss function has collectives, and evaluate calls it for each row alone; give evaluate a "
                "metrics_fn, which gets a whole batch, or a function fn without collectives"
            )

    def fits(self, replicas: Replicas) -> bool:
        """Return whether this instance drives the same replicas, and the values that the program read are unchanged."""
        return (self.is_independent or replicas.devices is self._devices) and self._reads.is_same()

    def begin(self, state: TrainState, batch: Masked) -> Callable[[], Results]:
        """Begin to compute, without waiting.

        Returns:
            A function that waits for, and returns, the results of the local replicas.
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
            return lambda: self._results(computed, masks)
        futures = devices.begin(lambda position: jax.block_until_ready(compute(position)), replicas.reducer.fail)
        return lambda: self._results(results_of(futures), masks)

    def _results(self, computed: Sequence[Tree], masks: Sequence[np.ndarray]) -> Results:
        hosted = [jax.tree.map(np.asarray, of_replica) for of_replica in computed]
        return [
            row_results(self._task.host_results(values, mask), mask) for values, mask in zip(hosted, masks, strict=True)
        ]

    def _compiled(self, device: jax.Device, rows: int) -> Function:
        """Return the program for a number of rows; for no rows a function that returns zeros."""
        if rows == 0:
            return lambda *arguments: self._nothing
        if (device, rows) not in self._executables:
            index, variables, values, mask, state = self._shapes
            values, mask = jax.tree.map(
                lambda one: jax.ShapeDtypeStruct((rows, *one.shape[1:]), one.dtype), (values, mask)
            )
            self._executables[device, rows] = self._program.compiled(device, index, variables, values, mask, state)
        return self._executables[device, rows]

    def _of_replica(
        self, index: jax.Array, variables: Variables, batch: Batch, mask: jax.Array, model_state: Tree
    ) -> Tree:
        key = jax.random.key(self._options.seed)
        context = self._replicas.new_context(index, self._task.title)
        with replica_context(context):
            given = () if model_state is None else (model_state,)
            computed = self._task(self._options.cast(variables), self._options.cast(batch), mask, key, *given)
        self.is_independent &= context.is_independent
        self._has_feeds |= context.has_feeds
        return computed


def _first(rows: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf if len(leaf) == rows else borrow(leaf)[:rows], tree)
