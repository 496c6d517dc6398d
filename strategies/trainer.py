"""The training step: gradients per replica, one ordered all-reduce, one update per instance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from optax import GradientTransformation

from strategies.argument_checks import positive, require_known_options
from strategies.core.engine import EvaluationTask, Results
from strategies.core.evaluation import Evaluation, Evaluator
from strategies.core.metrics import Metrics, StepNotice
from strategies.core.step import StepLoop, StepRules
from strategies.data.datasets import DistributedDataset
from strategies.data.every_row import every_row
from strategies.jax.engine import JaxEngine, flipped
from strategies.jax.evaluation.tasks import MetricsFunction, evaluation_task, prediction_task
from strategies.jax.gradients.computation import (
    check_loss_function,
    check_optimizer,
    check_takes_state,
    check_variables,
)
from strategies.jax.gradients.model_state import as_arrays, check_model_state
from strategies.jax.memory.of_step import MemoryPlanner
from strategies.jax.memory.plan import MemoryPlan
from strategies.jax.options import TrainerOptions, configured
from strategies.jax.preparation import StepPrograms
from strategies.jax.programs.compilation import shapes_of
from strategies.jax.replicas.reduction_ops import check_outside_replica
from strategies.jax.replicas.sharding import unchanging
from strategies.jax.step_record import recorder_for
from strategies.jax.updates.optimizers import AnyOptimizer, StepOptimizer, unwrapped
from strategies.placeholders import zeros_for_placeholders
from strategies.strategy import Strategy
from strategies.trees import rows_of
from strategies.typing import Batch, Function, LossFunction, Tree, Variables
from strategies.values import TrainState, check_state

__all__ = ["LossFunction", "Metrics", "TrainState", "Trainer"]


class Trainer:
    """A training with any loss function and optimizer of JAX, on all replicas of a strategy.

    Each step runs `loss_fn` once per replica. XLA's memory is read in place, as one flat buffer per dtype with the
    metrics at its end. The buffers are added in the order of a tree over replicas, and one compiled update per instance
    applies their mean. The variables have the same bits on every instance, and for every number of instances.

    Example::

        def loss_fn(variables, batch, key):
            logits = batch["image"] @ variables["w"] + variables["b"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-3))
        state = trainer.init({"w": np.zeros((784, 10), np.float32), "b": np.zeros(10, np.float32)})
        for batch in dataset.epoch(0):
            state, metrics = trainer.step(state, batch)  # metrics["loss"] is a float

    Args:
        strategy: The strategy whose replicas train.
        loss_fn: `(variables, batch, key) -> loss`, `-> (loss, {name: scalar})` or `-> Outcome`, for one replica and one
            micro-batch. The loss is a scalar; the key differs for each replica, step and micro-batch. With a model
            state: `(variables, batch, key, model_state) -> Outcome` with the new model state.
        optimizer: An optax gradient transformation, or a `MapGradientOptimizer`.
        seed: Seed of the keys.
        check_numerics: Whether to raise `NonFiniteGradientError` for a gradient or mean loss that is not finite. None:
            as the defaults of the strategy say.
        digest_every: Number of steps between comparisons of the bits of variables and optimizer state between
            instances; 0 for none.
        options: Other options by name, such as `gradient_accumulation_count` or `compute_dtype`; see `StepOptions` and
            its base class.

    Attributes:
        seed: Seed of the keys.

    Raises:
        TypeError: If `loss_fn` does not take three or four arguments, `optimizer` is not an optimizer, or an option is
            unknown.
        ValueError: If an option is out of range, or two options exclude each other.
    """

    def __init__(
        self,
        strategy: Strategy,
        loss_fn: LossFunction,
        optimizer: AnyOptimizer,
        seed: int = 0,
        check_numerics: bool | None = None,
        digest_every: int = 0,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.seed = seed
        self._strategy = strategy
        require_known_options(Trainer, options, TrainerOptions.__annotations__)
        optimizer, options["map_gradient"] = unwrapped(optimizer, options.get("map_gradient"))
        self._options = configured(seed, check_numerics, digest_every, options, strategy.defaults)
        self._put_together(loss_fn, optimizer)
        self._begun_with: tuple[Variables, Tree] | None = None  # shapes of variables and model state

    def _put_together(self, loss_fn: LossFunction, optimizer: StepOptimizer | GradientTransformation) -> None:
        """Make the parts that run steps, evaluations and memory plans."""
        replicas, options = self._strategy.replicas, self._options
        check_loss_function(loss_fn)
        traced: list[Function] = []
        if not isinstance(optimizer, StepOptimizer):
            check_optimizer(optimizer)
            traced.append(optimizer.update)
        recorder = recorder_for(replicas, options)
        self._programs = StepPrograms(replicas, loss_fn, optimizer, options, recorder is not None, traced)
        self._loss_fn = loss_fn
        self._engine = JaxEngine(replicas, self._programs, options, recorder is not None)
        self._loop = StepLoop(
            replicas,
            self._engine,
            StepRules(options.digest_every, options.check_numerics, options.unrecoverable_part, flipped, rows_of),
            options.scaling,
            recorder,
        )
        unrecoverable_part = None if self._engine.has_copies() else options.unrecoverable_part
        self._evaluator = Evaluator(replicas, self._engine, every_row, unrecoverable_part, self._loop.transfer)
        self._memory = MemoryPlanner(replicas, loss_fn, optimizer, options)

    @property
    def notice(self) -> StepNotice:
        """The notice that travels with the gradients of every step."""
        return self._loop.notice

    @property
    def variable_names(self) -> Sequence[str] | None:
        """The names of the trained variables in sinks, in the order of the pytree; None for their paths in it."""
        return self._engine.variable_names

    @variable_names.setter
    def variable_names(self, names: Sequence[str] | None) -> None:
        self._engine.variable_names = names

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas train."""
        return self._strategy

    @property
    def is_sharded(self) -> bool:
        """Whether instances hold different parts of the state: sharded optimizer or model state."""
        return self._options.unrecoverable_part is not None

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` for each array that this instance holds only in part."""
        return self._engine.whole(state)

    def init(self, variables: Variables, model_state: Tree = None) -> TrainState:
        """Return the first state, with instance 0's variables on every instance. Collective.

        Args:
            variables: Pytree of floating-point arrays, with the same shapes and dtypes on all instances.
            model_state: Pytree of arrays of any dtype that every batch changes without gradients, such as moving
                means, counters and keys. All replicas begin with instance 0's. Functions of evaluation and prediction
                get it too, as their last argument. None for no model state.

        Raises:
            TypeError: If a variable is not a floating-point array, the loss function does not take a model state, or it
                takes one and `model_state` is None.
            ValueError: If there is no variable, or a step used one up, or the model state does not fit
                `model_state_aggregation`.
            LayoutMismatchError: On all instances, if their variables differ in names, shapes or dtypes.
            RuntimeError: Inside `strategy.run` or a loss function.
        """
        check_outside_replica("trainer.init")
        state = self.adopt(TrainState(variables, None, 0, model_state=model_state))
        self._begun_with = shapes_of((variables, model_state))
        return state

    def adopt(self, state: TrainState) -> TrainState:
        """Continue a training that other code has begun, with instance 0's state on every instance. Collective.

        Args:
            state: Whole state. Its optimizer state must be one of this trainer's optimizer. If it
                has no loss scale, loss scaling begins anew.

        Raises:
            TypeError: If a variable or the model state has a wrong type, as in `init`.
            ValueError: If a variable was used up, or the model state does not fit, as in `init`.
            LayoutMismatchError: On all instances, if their variables differ in names, shapes or dtypes.
        """
        replicas = self._strategy.replicas
        if replicas.is_spare:
            state = zeros_for_placeholders(state)
        check_takes_state(self._loss_fn, state.model_state is not None)
        check_variables(state.variables, self._options.trainable)
        check_model_state(state.model_state)
        given = replace(state, model_state=as_arrays(state.model_state))
        self._options.rule_of(given.model_state)

        def begun(root: int = 0) -> TrainState:
            nonlocal given
            first: TrainState
            first, step = replicas.broadcast((given, np.int32(given.step)), root)
            given = replace(first, step=int(step))
            return self._engine.restore(given)

        return self._loop.start(begun, lambda: self._engine.restore(given), lambda state, root: begun(root))

    def plan(self, batch: Batch, variables: Variables = None, model_state: Tree = None) -> MemoryPlan:
        """Return the memory that this instance will need, before anything runs. Not collective.

        The call compiles the programs of a step and asks XLA for the memory of each. Print the plan, or use its
        `to_json`.

        Args:
            batch: Batch of this instance, or its shapes and dtypes as `jax.ShapeDtypeStruct`.
            variables: Variables, or their shapes and dtypes. None: those of the last `init`.
            model_state: Model state, or its shapes and dtypes.

        Raises:
            ValueError: If no variables are given and `init` was not called; or for a reason of `step`.
            TypeError: For a reason of `step`.
        """
        if variables is not None:
            return self._memory.plan(variables, model_state, batch)
        if self._begun_with is None:
            raise ValueError("plan was called before init; call init first, or give plan the variables or their shapes")
        return self._memory.plan(*self._begun_with, batch)

    def run(
        self,
        state: TrainState,
        dataset: Iterable[Batch],
        steps_per_execution: int = 1,
        after_execution: Callable[[TrainState, Metrics], None] = lambda state, metrics: None,
    ) -> tuple[TrainState, Metrics]:
        """Make a step with every batch of a data set. It uses `state` up, and gives the same bits as `step`.

        The device runs ahead until a metric is read. With one replica, the steps of an execution run in one program,
        without a return to Python, if that gives the same bits. The first execution finds this out, and a log message
        reports it. Several replicas exchange gradients once in every step.

        Args:
            state: State that `init`, `step` or `run` returned last.
            dataset: `DistributedDataset`, read to the end of its epoch; or an iterable of batches.
            steps_per_execution: Number of steps before each call of `after_execution`, run as one program if possible.
                The last execution is shorter if the number of batches is not a multiple.
            after_execution: Function called with the state and the metrics of the last step.

        Returns:
            The new state, and the metrics of the last step.

        Raises:
            ValueError: If the data set has no batch, or `steps_per_execution` is not positive; and the errors of
                `step`.
        """
        check_outside_replica("trainer.run")
        positive("steps_per_execution", steps_per_execution)
        check_state(state)
        if isinstance(dataset, DistributedDataset):
            dataset.restore(dataset.position())  # the rest of the epoch, not all of it
            dataset = dataset.epoch(dataset.position().epoch)
        elif self._engine.may_fuse and steps_per_execution > 1:  # an execution holds all its batches at once
            dataset = map(unchanging, dataset)
        batches, metrics = iter(dataset), None
        for batch in batches:
            rest = itertools.islice(batches, steps_per_execution - 1)
            state, metrics = self._execute(state, itertools.chain([batch], rest))
            after_execution(state, metrics)
        if metrics is None:
            raise ValueError("the data set has no batch; give run at least one")
        return state, metrics

    def _execute(self, state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        """Make a step with each of the batches, in one program if that gives the same bits."""
        if self._engine.may_fuse:
            batches = list(batches)
            made = self._engine.at_once(state, batches)
            if made is not None:
                state, metrics, tails = made
                self._loop.take_over(state, batches, metrics, tails)
                return state, metrics
        for batch in batches:
            state, metrics = self._loop.make_step(state, batch)
        return state, metrics

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Make one update, and use `state` up: its arrays are donated to the new state.

        An error of the batch, the loss function or the exchange leaves `state` as it was, and the step can be repeated
        with it.

        Args:
            state: State that `init`, `step` or `run` returned last.
            batch: Batch of this instance: pytree whose leaves hold the micro-batches of the local replicas, in replica
                order, along their first axis.

        Returns:
            The new state, and the metrics as means over all replicas.

        Raises:
            TypeError: If the loss is not a floating-point scalar, or a leaf of the batch is not an array.
            ValueError: If the local replicas do not divide the batch evenly, or a step has used the state up. If the
                batch has no rows, belongs to other replicas, lacks a key that the loss function reads, or has NumPy
                integers beyond JAX's range.
            NonFiniteGradientError: With `check_numerics`; the state is unchanged and still usable.
            DivergenceError: With `digest_every`, if instances have different bits.
            DisagreementError: On all instances, at the first step with a new shape of batches, if they differ in
                options, data set, loss function or optimizer.
        """
        check_outside_replica("trainer.step")
        check_state(state)
        return self._loop.make_step(state, batch)

    # ---- without training

    def evaluate(
        self,
        state: TrainState,
        dataset: Iterable[Batch],
        fn: LossFunction | None = None,
        *,
        metrics_fn: MetricsFunction | None = None,
    ) -> Evaluation:
        """Return means over all rows of a data set, each counted once. The state is unchanged. Collective.

        The function gets each row as a batch of one, so the mean over rows is exact for any number of rows. Values are
        added in float64: first a replica's rows in order, then the replicas in the order of the tree, then batch by
        batch. The bits depend on the number of replicas and the batch size, and not on the instances.

        Example::

            test = strategy.distribute_dataset(test_data, batch_size=32, shuffle=False, remainder="pad")
            trainer.evaluate(state, test)["loss"]

        Args:
            state: State that `init`, `step` or `run` returned last.
            dataset: `DistributedDataset` with `remainder="pad"`, read to the end of its epoch; or an iterable of this
                instance's batches. No batch may have more rows than the first.
            fn: Function like `loss_fn`, for instance without dropout; None for `loss_fn` itself. Its key is always
                `jax.random.key(seed)`.
            metrics_fn: Function used instead of `fn`: `(variables, batch, mask, key) -> {name: metric}` of all rows of
                a replica. Rows count if their `mask`, bool `[rows]`, is True. A metric is a `Mean`, or a pytree of
                arrays with a method `merge(other)`, which is called with host arrays.

        Raises:
            TypeError: If a loss or metric is not a scalar, or a result of `metrics_fn` cannot be merged.
            ValueError: If there is no row, or the data set leaves rows out or accumulates. If batches differ in more
                than the number of rows. If the function has feeds, or has collectives although it gets single rows. If
                a step has used the state up.
            DisagreementError: On all instances, if they would not compute the same.
        """
        check_state(state)
        task = evaluation_task(self._loss_fn, fn, metrics_fn, state.model_state is not None)
        return self._evaluator.evaluate(task, state, dataset)

    def predict(
        self, state: TrainState, dataset: Iterable[Batch], fn: LossFunction | None = None, *, to_all: bool = True
    ) -> Iterator[Tree]:
        """Yield the model's outputs for the rows of each batch, in the order of the data. Taking one is collective.

        If all instances leave the iterator early, the data set keeps its position after the last batch taken.

        Args:
            state: State that `init`, `step` or `run` returned last; no step may use it up before the last batch.
            dataset: Data set as in `evaluate`, with `shuffle=False`.
            fn: `(variables, batch, key) -> outputs` or `-> Outcome`, the outputs a pytree of arrays `[rows, ...]`. None
                for a `loss_fn` that returns an `Outcome` with outputs.
            to_all: Whether all instances get the outputs, as host arrays; if False, all but instance 0 get None.

        Raises:
            TypeError: For a reason of `evaluate`.
            ValueError: If the data set is shuffled, the outputs do not have one row per input row, or for a reason of
                `evaluate`.
            DisagreementError: On all instances, if they would not compute the same.
        """
        check_state(state)
        task = prediction_task(self._loss_fn, fn, state.model_state is not None)
        return self._evaluator.predict(task, state, dataset, to_all)

    def batch_results(
        self, task: EvaluationTask, state: TrainState, dataset: DistributedDataset | Iterable[Batch]
    ) -> Generator[Results, None, None]:
        """Yield the results of a task for each batch; `evaluate` and `predict` are built on it."""
        check_state(state)
        return self._evaluator.batch_results(task, state, dataset)
