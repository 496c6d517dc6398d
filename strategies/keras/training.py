"""The train function of a model: Keras's state goes into the steps of a `Trainer`, and comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from strategies.holding import HeldArrays
from strategies.jax.programs.program import jit
from strategies.jax.replicas.replica_context import get_replica_context
from strategies.jax.replicas.shards import PartOfArray
from strategies.keras.agreement import VariableWatch, bits_of, compared
from strategies.keras.checkpointing import SavedFit
from strategies.keras.divisors import LossDivision, NotedDivisors, dividing_by
from strategies.keras.extensions import ModelOptions
from strategies.keras.optimizer import KerasOptimizer
from strategies.keras.protocols import Array, Logs, ModelLike, State, Values
from strategies.keras.stages import StagedModel
from strategies.keras.state import METRICS, VARIABLES, ModelFunctions, Seeds, results_of, seeds_of
from strategies.outcome import Outcome
from strategies.pipelines.pipelining import Pipelining
from strategies.strategy import Strategy
from strategies.train_state import TrainState
from strategies.trainer import Trainer
from strategies.typing import Batch, Key, Number, Variables


class TrainFunction:
    """The function that makes the steps of `fit` and `train_on_batch`.

    Args:
        model: Model of Keras, built and compiled.
        strategy: Strategy whose replicas train.
        options: Options of the model.
        steps_per_execution: Number of steps of a call.
        watch: Watcher that knows whether the last step left the present variables.
        staged: Model in stages; None if the model has none, or marks its stages itself.

    Attributes:
        trainer: Trainer that makes the steps; None before the first step.
        saved: Checkpoints of the steps, while a `fit` with checkpoints runs.
        steps_made: Number of steps so far, up to the last call.
        words: Ways in which replicas agree on the untrained state, once there is a trainer.
    """

    def __init__(
        self,
        model: ModelLike,
        strategy: Strategy,
        options: ModelOptions,
        steps_per_execution: int,
        watch: VariableWatch,
        staged: StagedModel | None = None,
    ) -> None:
        self.trainer: Trainer | None = None
        self.saved: SavedFit | None = None
        self.steps_made = 0
        self._model = model
        self._strategy = strategy
        self._options = options
        self._steps = steps_per_execution
        self._watch = watch
        assert model.optimizer is not None  # refused before
        self._optimizer = KerasOptimizer(model.optimizer)
        seeds = Seeds(seeds_of(model))
        self._staged = staged
        self._functions = ModelFunctions(model, seeds, self._optimizer.for_unscaled_loss, staged or nullcontext)
        self._division = LossDivision(self._functions, options.micro_batches == 1 and not self._is_staged)
        self._results = jit(partial(results_of, model))
        self._names: tuple[str, ...] = ()  # names of logs that no metric has computed
        self._is_adopted = False
        self._skipped: Number = 0
        self._then: tuple[Values, TrainState] | None = None  # the restored state, if training resumes within an epoch
        self._parts: list[Array] | None = None  # this instance's parts of the optimizer state
        self._held: HeldArrays | None = None  # the replicas that these parts belong to, if others have copies of them

    def unite(self) -> None:
        """Give Keras the whole optimizer state. Collective if instances hold parts of it."""
        if self._parts is None:
            return
        assert self.trainer is not None
        self._model.jax_state_sync()  # within an epoch Keras's loop holds the values of variables
        trained = [variable.value for variable in self._model.trainable_variables]
        held = self.trainer.whole(TrainState(trained, self._parts, self.steps_made, held=self._held)).optimizer_state
        variables = self._optimizer.variables
        for number, (variable, value) in enumerate(zip(variables, held, strict=True)):
            if number >= self._optimizer.num_whole:  # Keras holds the variables before these whole
                is_cut = isinstance(value, PartOfArray)
                variable.assign(np.array(value.gather(f"optimizer state/{number}") if is_cut else value))

    def begin(self) -> None:
        """Broadcast instance 0's state before the next step: the user may have changed it."""
        self._is_adopted = False
        self._parts = None

    def __call__(self, state: State, iterator: Iterator[Batch]) -> tuple[Logs, State]:
        """Make steps with the next batches.

        Args:
            state: State of Keras's loop, which is used up.
            iterator: Batches of this instance.

        Returns:
            The results of metrics, and the new state.

        Raises:
            StopIteration: If there is no batch.
        """
        skipped = 0 if self.saved is None else self.saved.skip(self._steps)
        then, self._then = self._then, None
        if skipped == self._steps:
            return self._ended(*then, {}) if then else (dict(self._results(state[-1])), state)
        batch = next(iterator)
        own, begun = then or self._begun(state, batch)
        assert self.trainer is not None
        for each in itertools.chain([batch], itertools.islice(iterator, self._steps - skipped - 1)):
            before = begun.model_state[METRICS]
            begun, metrics = self.trainer.step(begun, each)
            if self._division.is_weighted:
                begun = self._with_loss(before, begun, metrics["loss"])
            if self.saved is not None:
                self.saved.after_step(begun)
        return self._ended(own, begun, {name: metrics[name] for name in self._names})  # without waiting for others

    def resume(self, batch: Batch, open_saved: Callable[[Trainer], SavedFit]) -> SavedFit:
        """Continue from the newest checkpoint, and give its state to Keras. Collective.

        Args:
            batch: Shapes and dtypes of the batch of a step.
            open_saved: Function that opens the checkpoints.
        """
        model, optimizer = self._model, self._optimizer
        assert model.optimizer is not None  # refused before
        trained, others = model.trainable_variables, model.non_trainable_variables
        all_of = [trained, others, model.optimizer.variables, model.metrics_variables]
        own, begun = self._begun([[one.value for one in variables] for variables in all_of], batch)
        assert self.trainer is not None
        saved = open_saved(self.trainer)
        state = saved.restored(begun)
        if state is begun:
            return saved
        of_state = state.model_state
        if state.loss_scale is not None:
            self._skipped = state.loss_scale.skipped
        inner = state.optimizer_state
        if self.trainer.is_sharded:
            self._parts, self._held, inner = inner, state.held, inner[: optimizer.num_whole]
            self.unite()
        values = [state.variables, of_state[VARIABLES], [*optimizer.with_scale(own, state.loss_scale), *inner]]
        for variables, found in zip(all_of, values, strict=False):
            for variable, value in zip(variables, found, strict=False):
                variable.assign(value)
        self.begin()
        if saved.skipped:
            self._then, self._is_adopted = (own, state), True
        return saved

    def _begun(self, state: State, batch: Batch) -> tuple[Values, TrainState]:
        """Return the optimizer's variables that the step does not use, and the state of the `Trainer`."""
        trained, others, of_optimizer, metrics = state
        own, inner = self._optimizer.divide(of_optimizer)
        begun = TrainState(
            list(trained),
            inner,
            self.steps_made,
            self._optimizer.scale_of(own, self._skipped),
            model_state={VARIABLES: list(others), METRICS: list(metrics)},
        )
        if self.trainer is None:
            self.trainer = self._made(begun, batch)
        if not self._is_adopted:
            self._is_adopted = True
            return own, self._adopted(replace(begun, step=self._optimizer.step_of(inner)))
        if self._parts is not None:  # Keras holds the whole variables before the parts, and callbacks change them
            count = self._optimizer.num_whole
            begun = replace(begun, optimizer_state=[*inner[:count], *self._parts[count:]], held=self._held)
        return own, self._placed(begun)

    def _adopted(self, state: TrainState) -> TrainState:
        """Return instance 0's state on all instances. Collective.

        If the variables are those that all instances agreed on, and all else is equal, nothing is sent.
        """
        assert self.trainer is not None
        if self._options.step:  # instances may hold parts of the state
            return self.trainer.adopt(state)
        is_other, is_same = not _may_be_used_up(state), True
        replicas = self._strategy.replicas
        if replicas.communicator.size > 1:
            others = bits_of((state.loss_scale, np.int64(state.step), state.model_state[METRICS]))
            is_other |= self._watch.is_changed
            is_other, is_same = compared(replicas, is_other, others, "variables were changed")
        return self.trainer.adopt(state) if is_other or not is_same else self._placed(state)

    def _placed(self, state: TrainState) -> TrainState:
        """Return the state on the devices of the programs: callbacks may have assigned variables."""
        trees = (state.variables, state.optimizer_state, state.model_state)
        if all(map(_is_placed, jax.tree.leaves(trees))):
            return state
        device = self._strategy.replicas.variables_device
        variables, optimizer_state, model_state = jax.tree.map(
            lambda leaf: leaf if _is_placed(leaf) else jax.device_put(leaf, device), trees
        )
        return replace(state, variables=variables, optimizer_state=optimizer_state, model_state=model_state)

    def _ended(self, own: Values, state: TrainState, metrics: Logs) -> tuple[Logs, State]:
        self.steps_made = state.step
        if state.loss_scale is not None:
            self._skipped = state.loss_scale.skipped
        others, of_metrics = state.model_state[VARIABLES], state.model_state[METRICS]
        logs = {**self._results(of_metrics), **metrics}
        inner = state.optimizer_state
        if self.trainer is not None and self.trainer.is_sharded:
            self._parts, self._held, inner = inner, state.held, inner[: self._optimizer.num_whole]
            self._optimizer.hold_places()
        of_optimizer = [*self._optimizer.with_scale(own, state.loss_scale), *inner]
        return logs, (state.variables, others, of_optimizer, of_metrics)

    def _loss(self, variables: Variables, batch: Batch, key: Key, model_state: Mapping[str, Values]) -> Outcome:
        """Compute the loss of a replica. The key is not used: the model has its own random states."""
        seeds, given = self._functions.seeds, model_state[VARIABLES]
        own = seeds.of_replica(given, get_replica_context().replica_id_in_sync_group)
        rule = self._division.rule(variables, own, model_state[METRICS], batch)
        with dividing_by(rule):
            loss, made, metrics, logs = self._functions.losses(
                variables, own, model_state[METRICS], batch, training=True
            )
        after = {VARIABLES: seeds.after(given, own, made), METRICS: metrics}
        named = {name: jnp.mean(jnp.asarray(logs[name])) for name in self._names}
        return Outcome(loss, named, after, weight=rule.weight if isinstance(rule, NotedDivisors) else None)

    def _with_loss(self, before: Values, state: TrainState, loss: float) -> TrainState:
        """Return the state with the weighted mean loss in Keras's mean over an epoch, weighted by rows as in Keras.

        Replicas have added their own losses, which are not weighted.

        Args:
            before: Values of the metrics before the step.
            state: State after the step.
            loss: Weighted mean loss of the step.
        """
        tracked = [id(variable) for variable in self._model._loss_tracker.variables]
        places = [place for place, one in enumerate(self._model.metrics_variables) if id(one) in tracked]
        if len(places) < len(tracked):  # the model does not report it
            return state
        total, count = places
        after = list(state.model_state[METRICS])
        after[total] = _added(before[total], after[count] - before[count], np.float32(loss))
        return replace(state, model_state={**state.model_state, METRICS: after})

    def _made(self, state: TrainState, batch: Batch) -> Trainer:
        rows = jax.tree.map(self._strategy.replicas.devices.replica_shape, batch)
        parts = (state.variables, state.model_state[VARIABLES], state.model_state[METRICS])
        self.words, self._names = self._functions.words(*parts, jax.tree.map(self._micro_shape, rows), training=True)
        options = self._options
        trainer = Trainer(
            self._strategy,
            self._loss,
            self._optimizer,
            gradient_accumulation_count=options.micro_batches,
            reduction_method=options.reduction_method,
            model_state_aggregation=self.words,
            loss_scaling=self._optimizer.scaling,
            pipeline=self._pipeline,
            **options.step,
        )
        trainer.variable_names = [variable.path for variable in self._model.trainable_variables]
        return trainer

    @property
    def _is_staged(self) -> bool:
        return self._staged is not None or self._options.is_pipelined

    @property
    def _pipeline(self) -> Pipelining | None:
        if not self._is_staged:
            return None
        if self._options.accumulated is None:
            raise ValueError(
                "the model is pipelined, but gradient_accumulation_steps_per_replica is not set; give it to "
                "set_pipelining_options: stages work on several micro-batches at once"
            )
        mapping: Sequence[int] | None = (self._options.pipelining or {}).get("device_mapping")
        if self._staged is None and mapping is None:
            raise ValueError(
                "the model marks its stages itself, so their number is not known; give device_mapping to "
                "set_pipelining_options, with a device for each stage"
            )
        stages = len(mapping or ()) if self._staged is None else self._staged.count
        return self._options.pipeline(stages, self._strategy.replicas.grid.ipus_per_replica)

    def _micro_shape(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows = shape.shape[0] // self._options.micro_batches
        return jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)


@jax.jit
def _added(total: Array, rows: Array, loss: Number) -> jax.Array:
    """Return a sum of losses times rows, with the loss of a step; unchanged if the step was not applied."""
    return jnp.where(rows > 0, total + loss * rows, total)


def _is_placed(leaf: Array) -> bool:
    """Return whether programs take the array where it is, as they do arrays of the host."""
    if isinstance(leaf, jax.Array):
        return bool(leaf.committed)
    return isinstance(leaf, np.ndarray | np.generic)


def _may_be_used_up(state: TrainState) -> bool:
    """Return whether a step may reuse the memory of a state: each array has its own memory."""
    leaves = jax.tree.leaves((state.variables, state.optimizer_state))
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return False
    return len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
