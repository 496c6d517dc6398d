"""The train, test and predict functions of a model: Keras's state goes into the steps of a `Trainer`, and back."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from keras import tree
from keras.utils import pack_x_y_sample_weight
from typing_extensions import override

from collectives.tree import combined
from strategies.core.engine import EvaluationTask, Results, in_order, padded
from strategies.core.metrics import Metrics
from strategies.errors import StrategyError
from strategies.jax.gradients.model_state import ALIKE, CONSTANT, FIRST, MEAN
from strategies.jax.programs.compilation import jit
from strategies.jax.programs.jaxpr import depends_on, looks
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.jax.replicas.variables import PartOfArray
from strategies.keras.callbacks import VariableWatch, bits_of, broadcast, compared
from strategies.keras.checkpointing import SavedFit
from strategies.keras.data import FeedEpoch
from strategies.keras.extensions import ModelOptions
from strategies.keras.stages import StagedModel
from strategies.keras.state import (
    METRICS,
    VARIABLES,
    Array,
    Logs,
    ModelFunctions,
    Seeds,
    State,
    Values,
    reductions_of,
    reductions_of_metrics,
    results_of,
    seeds_of,
    shape_of,
)
from strategies.keras.updates import (
    KerasOptimizer,
    LossDivision,
    Mean,
    NotedDivisors,
    averaging,
    by_mean_of_replicas,
    dividing_by,
    mean_over_replicas,
)
from strategies.pipelines.pipelining import Pipelining
from strategies.stored_shards import StoredShards
from strategies.strategy import Strategy
from strategies.trainer import Trainer
from strategies.typing import Batch, Key, Number, Tree, Variables
from strategies.values import Outcome, TrainState

TRAINED, OPTIMIZER = "trained", "optimizer"
_PARTS = (TRAINED, VARIABLES, OPTIMIZER, METRICS)
"""The parts of the state that a `train_step` takes and returns, in its order."""

Parts: TypeAlias = dict[str, Values]
"""A state by its parts."""


@dataclass(eq=False)
class TrainFunction(ABC):
    """The function that makes the steps of `fit` and `train_on_batch`.

    Attributes:
        prefix: Beginning of the names that logs have as metrics of a step.
        model: Model of Keras, built and compiled.
        strategy: Strategy whose replicas train.
        options: Options of the model.
        steps: Number of steps of a call.
        watch: Watcher that knows whether the last step left the present variables.
        staged: Model in stages; None if the model has none, or marks its stages itself.
        trainer: Trainer that makes the steps; None before the first step.
        saved: Checkpoints of the steps, while a `fit` with checkpoints runs.
        steps_made: Number of steps so far, up to the last call.
        reductions: Ways in which replicas agree on the untrained state, once there is a trainer.
        trained: Identities of the variables to train.
    """

    prefix: ClassVar[str] = ""
    model: keras.Model
    strategy: Strategy
    options: ModelOptions
    steps: int
    watch: VariableWatch
    staged: StagedModel | None

    def __post_init__(self) -> None:
        self.trainer: Trainer | None = None
        self.saved: SavedFit | None = None
        self.steps_made = 0
        self.reductions: dict[str, list[str]] = {}
        self.trained = list(map(id, self.model.trainable_variables))
        self._seeds = Seeds(seeds_of(self.model))
        self._results = jit(partial(results_of, self.model))
        self._names: tuple[str, ...] = ()  # names of logs that no metric has computed
        self._order: tuple[str, ...] | None = None  # names of all logs; None for the results of metrics, and the others
        self._is_adopted = False
        self._then: tuple[Values, TrainState] | None = None  # the restored state, if training resumes within an epoch

    @abstractmethod
    def unite(self) -> None:
        """Give Keras the whole optimizer state. Collective if instances hold parts of it."""

    @abstractmethod
    def _divided(self, state: State) -> tuple[Values, TrainState]:
        """Return the values that steps do not use, and the state of the `Trainer`."""

    @abstractmethod
    def _joined(self, own: Values, state: TrainState) -> State:
        """Return the state of Keras's loop, as the opposite of `_divided`."""

    @abstractmethod
    def _made(self, state: TrainState, rows: Batch) -> Trainer:
        """Return the trainer, given the first state and shapes of a replica's rows; set `reductions` and `_names`."""

    def begin(self) -> None:
        """Broadcast instance 0's state before the next step: the user may have changed it."""
        self._is_adopted = False

    def __call__(self, state: State, iterator: Iterator[Batch]) -> tuple[Logs, State]:
        """Make steps with the next batches.

        Args:
            state: State of Keras's loop, which is used up.
            iterator: Batches of this instance.

        Returns:
            The logs, with the results of metrics, and the new state.

        Raises:
            StopIteration: If there is no batch.
        """
        skipped = 0 if self.saved is None else self.saved.skip(self.steps)
        then, self._then = self._then, None
        if skipped == self.steps:
            return self._ended(*then, {}) if then else (dict(self._results(state[-1])), state)
        batch = next(iterator)
        own, begun = then or self._begun(state, batch)
        assert self.trainer is not None
        for each in itertools.chain([batch], itertools.islice(iterator, self.steps - skipped - 1)):
            before, (begun, metrics) = begun.model_state[METRICS], self.trainer.step(begun, each)
            begun = self._counted(before, begun, metrics)
            if self.saved is not None:
                self.saved.after_step(begun)
        # Read without waiting for others.
        return self._ended(own, begun, {name: metrics[self.prefix + name] for name in self._names})

    def _counted(self, before: Values, state: TrainState, metrics: Metrics) -> TrainState:
        """Return the state after a step that began with these values of Keras's metrics."""
        return state

    def _begun(self, state: State, batch: Batch) -> tuple[Values, TrainState]:
        """Return the values that steps do not use, and the state of the `Trainer`."""
        own, begun = self._divided(state)
        if self.trainer is None:
            self.trainer = self._made(begun, jax.tree.map(self.strategy.replicas.devices.replica_shape, batch))
        if self._is_adopted:
            return own, self._placed(begun)
        self._is_adopted = True
        return own, self._adopted(begun)

    def _adopted(self, state: TrainState) -> TrainState:
        """Return instance 0's state on all instances. Collective.

        If the variables are those that all instances agreed on, and all else is equal, nothing is sent.
        """
        assert self.trainer is not None
        if self.options.step:  # instances may hold parts of the state
            return self.trainer.adopt(state)
        is_other, is_same = not _may_be_used_up(state), True
        replicas = self.strategy.replicas
        if replicas.communicator.size > 1:
            others = bits_of((state.loss_scale, np.int64(state.step), state.model_state[METRICS]))
            is_other |= self.watch.is_changed
            is_other, is_same = compared(replicas, is_other, others, "variables were changed")
        return self.trainer.adopt(state) if is_other or not is_same else self._placed(state)

    def _placed(self, state: TrainState) -> TrainState:
        """Return the state on the devices of the programs: callbacks may have assigned variables."""
        trees = (state.variables, state.optimizer_state, state.model_state)
        if all(map(_is_placed, jax.tree.leaves(trees))):
            return state
        device = self.strategy.replicas.variables_device
        variables, optimizer_state, model_state = jax.tree.map(
            lambda leaf: leaf if _is_placed(leaf) else jax.device_put(leaf, device), trees
        )
        return replace(state, variables=variables, optimizer_state=optimizer_state, model_state=model_state)

    def _ended(self, own: Values, state: TrainState, results: Logs) -> tuple[Logs, State]:
        self.steps_made = state.step
        found: Logs = {**self._results(state.model_state[METRICS]), **results}
        names = found if self._order is None else self._order
        return {name: found[name] for name in names}, self._joined(own, state)


@final
class StockTrainFunction(TrainFunction):
    """The train function of a model with Keras's own `train_step`: the trainer makes the update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._optimizer = KerasOptimizer(self.model.optimizer)
        unscaled = self._optimizer.for_unscaled_loss
        self._functions = ModelFunctions(self.model, self._seeds, unscaled, self.staged or nullcontext)
        self._division = LossDivision(self._functions, self.options.micro_batches == 1 and not self._is_staged)
        self._skipped: Number = 0
        self._parts: list[Array] | None = None  # this instance's parts of the optimizer state
        self._held: StoredShards | None = None  # the replicas that these parts belong to, if others have copies of them
        self._shown: list[Array] = []  # the whole values that Keras got last in place of the parts

    def _take_changes(self, inner: Sequence[Array | None]) -> None:
        """Forget the parts if the program has replaced values that `unite` has given to Keras: those are whole."""
        if any(new is not old for new, old in zip(inner[self._optimizer.num_whole :], self._shown, strict=False)):
            self.begin()

    @override
    def unite(self) -> None:
        self._take_changes([variable._value for variable in self._optimizer.variables])
        if self._parts is None:
            return
        assert self.trainer is not None
        self.model.jax_state_sync()  # within an epoch Keras's loop holds the values of variables
        trained = [variable.value for variable in self.model.trainable_variables]
        held = self.trainer.whole(TrainState(trained, self._parts, self.steps_made, held=self._held)).optimizer_state
        variables, count = self._optimizer.variables, self._optimizer.num_whole
        for number, (variable, value) in enumerate(zip(variables, held, strict=True)):
            if number >= count:  # Keras holds the variables before these whole
                is_cut = isinstance(value, PartOfArray)
                variable.assign(np.array(value.gather(f"optimizer state/{number}") if is_cut else value))
        self._shown = [variable.value for variable in variables[count:]]

    @override
    def begin(self) -> None:
        super().begin()
        self._parts, self._held, self._shown = None, None, []

    def resume(self, batch: Batch, open_saved: Callable[[Trainer], SavedFit]) -> SavedFit:
        """Continue from the newest checkpoint, and give its state to Keras. Collective.

        Args:
            batch: Shapes and dtypes of the batch of a step.
            open_saved: Function that opens the checkpoints.
        """
        model = self.model
        trained, others = model.trainable_variables, model.non_trainable_variables
        all_of = [trained, others, model.optimizer.variables, model.metrics_variables]
        own, begun = self._begun([[one.value for one in variables] for variables in all_of], batch)
        assert self.trainer is not None
        saved = open_saved(self.trainer)
        state = saved.restored(begun)
        if state is begun:
            return saved
        *values, _ = self._joined(own, state)
        self.unite()
        for variables, found in zip(all_of, values, strict=False):  # without metrics, and parts of the optimizer state
            for variable, value in zip(variables, found, strict=False):
                variable.assign(value)
        self.begin()
        if saved.skipped:
            self._then, self._is_adopted = (own, state), True
        return saved

    @override
    def _divided(self, state: State) -> tuple[Values, TrainState]:
        trained, others, of_optimizer, metrics = state
        own, inner = self._optimizer.divide(of_optimizer)
        step = self.steps_made if self._is_adopted else self._optimizer.step_of(inner)
        self._take_changes(inner)
        if self._parts is not None:  # Keras holds the whole variables before the parts, and callbacks change them
            count = self._optimizer.num_whole
            inner = [*inner[:count], *self._parts[count:]]
        scale = self._optimizer.scale_of(own, self._skipped)
        model_state = {VARIABLES: list(others), METRICS: list(metrics)}
        return own, TrainState(list(trained), inner, step, scale, model_state=model_state, held=self._held)

    @override
    def _joined(self, own: Values, state: TrainState) -> State:
        if state.loss_scale is not None:
            self._skipped = state.loss_scale.skipped
        inner = state.optimizer_state
        if self.trainer is not None and self.trainer.is_sharded:
            self._parts, self._held, inner = inner, state.held, inner[: self._optimizer.num_whole]
            self._optimizer.hold_places()
            self._shown = []
        of_optimizer = [*self._optimizer.with_scale(own, state.loss_scale), *inner]
        return state.variables, state.model_state[VARIABLES], of_optimizer, state.model_state[METRICS]

    def _loss(self, variables: Variables, batch: Batch, key: Key, model_state: Mapping[str, Values]) -> Outcome:
        """Compute the loss of a replica. The key is not used: the model has its own random states."""
        seeds, given = self._seeds, model_state[VARIABLES]
        own = seeds.of_replica(given, get_replica_context().replica_id_in_sync_group)
        rule = self._division.rule(variables, own, model_state[METRICS], batch)
        with dividing_by(rule):
            loss, made, metrics, logs = self._functions.losses(
                variables, own, model_state[METRICS], batch, training=True
            )
        after = {VARIABLES: seeds.after(given, own, made), METRICS: metrics}
        named = {name: jnp.mean(jnp.asarray(logs[name])) for name in self._names}
        return Outcome(loss, named, after, weight=rule.weight if isinstance(rule, NotedDivisors) else None)

    @override
    def _counted(self, before: Values, state: TrainState, metrics: Metrics) -> TrainState:
        # Replicas have added their own losses, which are not weighted, to Keras's mean over an epoch. Put the weighted
        # mean loss there, weighted by rows as in Keras.
        if not self._division.is_weighted:
            return state
        tracker: Any = self.model._loss_tracker
        tracked = [id(variable) for variable in tracker.variables]
        places = [place for place, one in enumerate(self.model.metrics_variables) if id(one) in tracked]
        if len(places) < len(tracked):  # the model does not report it
            return state
        total, count = places
        after = list(state.model_state[METRICS])
        after[total] = _added(before[total], after[count] - before[count], np.float32(metrics["loss"]))
        return replace(state, model_state={**state.model_state, METRICS: after})

    @override
    def _made(self, state: TrainState, rows: Batch) -> Trainer:
        parts = (state.variables, state.model_state[VARIABLES], state.model_state[METRICS])
        self.reductions, self._names = self._functions.reductions(
            *parts, jax.tree.map(self._micro_shape, rows), training=True
        )
        options = self.options
        trainer = Trainer(
            self.strategy,
            self._loss,
            self._optimizer,
            gradient_accumulation_count=options.micro_batches,
            reduction_method=options.reduction_method,
            model_state_aggregation=self.reductions,
            loss_scaling=self._optimizer.scaling,
            pipeline=self._pipeline,
            **options.step,
        )
        trainer.variable_names = [variable.path for variable in self.model.trainable_variables]
        return trainer

    @property
    def _is_staged(self) -> bool:
        return self.staged is not None or self.options.is_pipelined

    @property
    def _pipeline(self) -> Pipelining | None:
        if not self._is_staged:
            return None
        if self.options.accumulated is None:
            raise ValueError(
                "the model is pipelined, but gradient_accumulation_steps_per_replica is not set; give it to "
                "set_pipelining_options: stages work on several micro-batches at once"
            )
        mapping: Sequence[int] | None = (self.options.pipelining or {}).get("device_mapping")
        if self.staged is None and mapping is None:
            raise ValueError(
                "the model marks its stages itself, so their number is not known; give device_mapping to "
                "set_pipelining_options, with a device for each stage"
            )
        stages = len(mapping or ()) if self.staged is None else self.staged.count
        return self.options.pipeline(stages, self.strategy.replicas.grid.ipus_per_replica)

    def _micro_shape(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows = shape.shape[0] // self.options.micro_batches
        return jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)


@jax.jit
def _added(total: Array, rows: Array, loss: Number) -> jax.Array:
    """Return a sum of losses times rows, with the loss of a step; unchanged if the step was not applied."""
    return jnp.where(rows > 0, total + loss * rows, total)


@final
class OwnTrainFunction(TrainFunction):
    """The train function of a model with its own `train_step`, which applies the mean of all replicas' gradients.

    All state is model state, because a step goes on with what `stateless_apply` returns; the trainer trains nothing.
    """

    prefix = "log "

    def __post_init__(self) -> None:
        super().__post_init__()
        # Taken once, so that every batch gets the step that is looked at below.
        self._train_step: Callable[..., tuple[Logs, State]] = self.model.train_step

    @override
    def unite(self) -> None:
        """Do nothing: Keras has the whole state."""

    @override
    def _divided(self, state: State) -> tuple[Values, TrainState]:
        nothing = {"nothing": jnp.zeros((), jnp.float32)}
        parts = dict(zip(_PARTS, map(list, state), strict=True))
        return (), TrainState(nothing, optax.EmptyState(), self.steps_made, model_state=parts)

    @override
    def _joined(self, own: Values, state: TrainState) -> State:
        return tuple(state.model_state[part] for part in _PARTS)

    @override
    def _made(self, state: TrainState, rows: Batch) -> Trainer:
        self.reductions = self._looked_at(*jax.tree.map(shape_of, (state.model_state, rows)))
        return Trainer(self.strategy, self._loss, optax.set_to_zero(), model_state_aggregation=self.reductions)

    def _step(self, state: Mapping[str, Values], batch: Batch, mean: Mean) -> tuple[Logs, Parts]:
        """Return the logs and the new state; traceable by JAX.

        Args:
            state: State by its parts; see `_PARTS`.
            batch: `(x, y, sample_weight)` of one replica.
            mean: Function applied to the gradients given to `optimizer.stateless_apply`, for all optimizers of the
                model.
        """
        optimizers = [one for one in tree.flatten(list(vars(self.model).values())) if isinstance(one, keras.Optimizer)]
        with averaging(optimizers, mean):
            logs, new = self._train_step(tuple(list(state[part]) for part in _PARTS), pack_x_y_sample_weight(*batch))
        return _flat(logs), dict(zip(_PARTS, map(list, new), strict=True))

    def _loss(self, variables: Variables, batch: Batch, key: Key, model_state: Parts) -> Outcome:
        """Make the step of a replica. All state is model state, so `variables` has nothing to train."""
        seeds, given = self._seeds, model_state[VARIABLES]
        own = seeds.of_replica(given, get_replica_context().replica_id_in_sync_group)
        with dividing_by(by_mean_of_replicas):
            logs, new = self._step({**model_state, VARIABLES: own}, batch, mean_over_replicas)
        new[VARIABLES] = seeds.after(given, own, new[VARIABLES])
        results = {self.prefix + name: jnp.mean(jnp.asarray(logs[name], jnp.float32)) for name in self._names}
        return Outcome(0 * variables["nothing"], results, new)

    def _looked_at(self, parts: Parts, batch: Batch) -> dict[str, list[str]]:
        """Return, for each variable of each part of the state, how replicas agree on its value."""
        old, structure = jax.tree.flatten(parts)
        split = partial(jax.tree.unflatten, structure)

        def after(leaves: Values, batch: Batch, mean: Mean = lambda gradients: gradients) -> list[Array]:
            logs, new = self._step(split(leaves), batch, mean)
            self._order = tuple(logs)
            return jax.tree.leaves(new)

        changed, adds = map(split, looks(after, old, batch))
        results, metrics = partial(results_of, self.model), parts[METRICS]
        names = sorted(jax.eval_shape(results, metrics))
        are_updated = depends_on(lambda values: jax.tree.leaves(results(values)), metrics, changed[METRICS])
        updated = {name for name, is_updated in zip(names, are_updated, strict=True) if is_updated}
        self._names = tuple(name for name in self._order or () if name not in updated)
        flags = self._seeds.flags
        none = {part: [False] * len(parts[part]) for part in _PARTS}
        own = jax.tree.leaves({**none, VARIABLES: flags, METRICS: [True] * len(parts[METRICS])})
        without_gradients = partial(after, mean=partial(jax.tree.map, jnp.zeros_like))
        depends = split(depends_on(without_gradients, old, own, batch))
        self._check_changes_averaged(depends)
        reductions = reductions_of(self.model.non_trainable_variables, flags, changed[VARIABLES])
        pairs = zip(reductions, depends[VARIABLES], strict=True)
        agreed = [reduction if is_of_rows or reduction == CONSTANT else ALIKE for reduction, is_of_rows in pairs]
        return {
            TRAINED: [ALIKE if is_changed else CONSTANT for is_changed in changed[TRAINED]],
            VARIABLES: agreed,
            OPTIMIZER: [ALIKE if is_changed else CONSTANT for is_changed in changed[OPTIMIZER]],
            METRICS: reductions_of_metrics(self.model.metrics_variables, changed[METRICS], adds[METRICS]),
        }

    def _check_changes_averaged(self, depends: Mapping[str, Sequence[bool]]) -> None:
        """Refuse a step that computes variables from a replica's rows without the mean over replicas."""
        variables = {TRAINED: self.model.trainable_variables, OPTIMIZER: self.model.optimizer.variables}
        for part, of_part in variables.items():
            for variable, depends_on_replica in zip(of_part, depends[part], strict=True):
                if depends_on_replica:
                    raise StrategyError(
                        f"train_step computes {variable.path!r} from the rows of a replica, and not by "
                        "optimizer.stateless_apply of an optimizer that is an attribute of the model, so replicas "
                        "would have different values; use stateless_apply, or strategies.Trainer"
                    )


def _flat(logs: Mapping[str, Number]) -> Logs:
    """Return logs as Keras reports them, with one name for each result of a metric."""
    found: Logs = {}
    for name, value in logs.items():
        found |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return found


def _is_placed(leaf: Array) -> bool:
    """Return whether programs take the array where it is, as they do arrays of the host."""
    return bool(leaf.committed) if isinstance(leaf, jax.Array) else isinstance(leaf, np.ndarray | np.generic)


def _may_be_used_up(state: TrainState) -> bool:
    """Return whether a step may reuse the memory of a state: each array has its own memory."""
    leaves = jax.tree.leaves((state.variables, state.optimizer_state))
    are_arrays = all(isinstance(leaf, jax.Array) for leaf in leaves)
    return are_arrays and len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# ---- test and predict


@dataclass(frozen=True)
class _OfRows(EvaluationTask):
    """A task of a model on its real rows, without padding.

    Its batches are `(numbers, batch)`, with the numbers of the rows in the data, so that replicas and batches draw from
    different random states.
    """

    is_exact: ClassVar[bool] = True
    functions: ModelFunctions

    def __call__(self, variables: Variables, batch: Batch, mask: jax.Array, key: Key, model_state: Tree) -> Tree:
        numbers, rows = batch
        replica = get_replica_context().replica_id_in_sync_group
        others = self.functions.seeds.of_replica(model_state[VARIABLES], replica, numbers[0])
        return jax.tree.map(jnp.asarray, self._computed(variables, others, rows))

    @abstractmethod
    def _computed(self, variables: Variables, others: Values, rows: Batch) -> Tree:
        """Return the results for rows, given the variables that are not trained; traceable by JAX."""

    @override
    def host_results(self, computed: Tree, mask: np.ndarray) -> Tree:
        return computed


@dataclass(frozen=True)
class _MetricsTask(_OfRows):
    """A task that computes the contribution of a replica's rows to the variables of metrics."""

    title: ClassVar[str] = "evaluation"

    @override
    def _computed(self, variables: Variables, others: Values, rows: Batch) -> Tree:
        zeros = [jnp.zeros(one.shape, one.dtype) for one in self.functions.model.metrics_variables]
        _, _, metrics, logs = self.functions.losses(variables, others, zeros, rows, training=False)
        return metrics, logs


@dataclass(frozen=True)
class _OutputsTask(_OfRows):
    """A task that computes the model's outputs for each row."""

    title: ClassVar[str] = "prediction"

    @override
    def _computed(self, variables: Variables, others: Values, rows: Batch) -> Tree:
        return self.functions.outputs(variables, others, rows)

    @override
    def host_results(self, computed: Tree, mask: np.ndarray) -> Tree:
        return jax.tree.map(partial(padded, mask=mask), computed)


class _Function(ABC):
    """The common part of the test and the predict function.

    Args:
        model: Model of Keras, built.
        strategy: Strategy whose replicas compute.
        steps_per_execution: Number of batches of a call.

    Attributes:
        kind: Class of the task for each batch.
        model: Model.
    """

    kind: ClassVar[type[_OfRows]]

    def __init__(self, model: keras.Model, strategy: Strategy, steps_per_execution: int) -> None:
        self.model = model
        self._strategy = strategy
        self._steps = steps_per_execution
        self.functions = ModelFunctions(model, Seeds(seeds_of(model)))
        self._task = self.kind(self.functions)
        self._trainer = Trainer(strategy, _no_loss, optax.identity())
        self._results = jit(partial(results_of, model))
        self.begin()

    def begin(self) -> None:
        """Broadcast instance 0's variables before the next batch: the user may have changed them."""
        self._is_adopted = False

    @abstractmethod
    def __call__(self, state: State, iterator: FeedEpoch) -> tuple[Tree, State]:
        """Return the results of the next batches that Keras asks for, and the state."""

    def taken(self, state: State, iterator: FeedEpoch) -> tuple[list[Results], State]:
        """Return all replicas' results for the next batches, and the state.

        Raises:
            StopIteration: If there is no batch.
        """
        trained, others, *rest = state
        if not self._is_adopted:
            self._is_adopted = True
            trained, others = broadcast(self._strategy.replicas, (list(trained), list(others)))
        given = TrainState(list(trained), None, 0, model_state={VARIABLES: list(others)})
        stream = iterator.batch_results(lambda dataset: self._trainer.batch_results(self._task, given, dataset))
        results = list(itertools.islice(stream, self._steps))
        if not results:
            raise StopIteration
        return results, (trained, others, *rest)


class TestFunction(_Function):
    """The function that evaluates for `evaluate` and `test_on_batch`."""

    kind = _MetricsTask

    def begin(self) -> None:
        """Broadcast instance 0's variables before the next batch, and find out again how metrics are merged."""
        super().begin()
        self._reductions: list[str] | None = None
        self.forget()

    def forget(self) -> None:
        """Reset the metrics."""
        self._seen = 0

    def __call__(self, state: State, iterator: FeedEpoch) -> tuple[Logs, State]:
        """Evaluate the next batches.

        Args:
            state: State of Keras's loop.
            iterator: Pass over the data.

        Returns:
            The results of metrics so far, and the new state.

        Raises:
            StopIteration: If there is no batch.
            StrategyError: If a metric cannot be merged.
        """
        if self._reductions is None:
            trained, others, before = state
            reductions, _ = self.functions.reductions(trained, others, before, iterator.feed.example, training=False)
            self._reductions = reductions[METRICS]
        results, (trained, others, of_metrics) = self.taken(state, iterator)
        metrics = [np.asarray(one) for one in of_metrics]
        logs: Logs = {}
        for of_replicas in results:
            counted = [one.tree for one in of_replicas if one.mask.any()]
            if counted:
                self._seen += len(counted)
                of_variables = zip(*(made for made, _ in counted), strict=True)
                metrics = [self._merged(*each) for each in zip(self._reductions, metrics, of_variables, strict=True)]
                logs = logs or counted[0][1]
        return dict(logs) | dict(self._results(metrics)), (trained, others, metrics)

    def _merged(self, reduction: str, old: np.ndarray, made: Sequence[np.ndarray]) -> np.ndarray:
        """Return a metric's variable plus the contributions of the replicas, or their running mean."""
        if reduction == FIRST:
            return np.asarray(made[0])
        total = combined(made, np.add)
        if reduction == MEAN:
            return np.asarray(old + (total - len(made) * old) / np.asarray(self._seen, total.dtype), total.dtype)
        return np.asarray(old + total)


class PredictFunction(_Function):
    """The function that predicts for `predict` and `predict_on_batch`."""

    kind = _OutputsTask

    def __call__(self, state: State, iterator: FeedEpoch) -> tuple[Tree, State]:
        """Return the outputs for the next batches, in the order of the data, and the state."""
        results, state = self.taken(state, iterator)
        batches = [in_order(of_replicas, False) for of_replicas in results]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches), state


def _no_loss(variables: Variables, batch: Batch, key: Key, model_state: Tree) -> Outcome:
    raise AssertionError("evaluation and prediction compute no loss to train with")
