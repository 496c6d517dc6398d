"""The training step: gradients per replica, one ordered all-reduce, one update per instance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Unpack

import numpy as np
from optax import GradientTransformation

from strategies.argument_checks import positive, require_known_options
from strategies.core.evaluation import Evaluation, Evaluator
from strategies.core.metrics import Metrics, StepNotice
from strategies.core.rows import EvaluationTask, Told
from strategies.core.step import StepLoop, StepRules
from strategies.data.datasets import DistributedDataset
from strategies.data.every_row import every_row
from strategies.jax.engine import JaxEngine, flipped, rows_of
from strategies.jax.evaluation.tasks import MetricsFunction, evaluation_task, prediction_task
from strategies.jax.gradients.arguments import (
    check_loss_function,
    check_optimizer,
    check_state,
    check_takes_state,
    check_variables,
)
from strategies.jax.gradients.model_state import as_arrays, check_model_state
from strategies.jax.memory.of_step import MemoryPlanner
from strategies.jax.memory.plan import MemoryPlan
from strategies.jax.options import TrainerOptions, configured
from strategies.jax.preparation import StepPrograms
from strategies.jax.programs.program import shapes_of
from strategies.jax.replicas.dealing import unchanging
from strategies.jax.replicas.replica_context import refuse_in_replica
from strategies.jax.step_record import recorder_for
from strategies.jax.updates.optimizers import AnyOptimizer, StepOptimizer, unwrapped
from strategies.strategy import Strategy
from strategies.train_state import TrainState
from strategies.typing import Batch, Function, LossFunction, Tree, Variables

__all__ = ["LossFunction", "Metrics", "TrainState", "Trainer"]


class Trainer:
    """Trains variables on all replicas of a strategy.

    Each step runs `loss_fn` once per replica; the gradients leave XLA as views of its memory, one flat buffer per
    dtype with the metrics in its tail; the buffers are added in the order of a tree over replicas; one compiled
    update per instance applies their mean. The variables have the same bits on every instance, and for every number
    of instances.

    Args:
        strategy: where the replicas are.
        loss_fn: `(variables, batch, key) -> loss`, `-> (loss, {name: scalar})` or `-> Outcome` for one replica and one
            micro-batch; the loss is a scalar, the key differs for each replica, step and micro-batch. With a model
            state `(variables, batch, key, model_state) -> Outcome`, which has the new one.
        optimizer: an optax gradient transformation, or a `MapGradientOptimizer`.
        seed: of the keys.
        check_numerics: raise `NonFiniteGradientError` for the first gradient that is NaN or infinite. None: as the
            defaults of the strategy say.
        digest_every: compare the bits of variables and optimizer state between instances before every so many steps.
        options: the others, by name: `gradient_accumulation_count`, `compute_dtype`, ... See `StepOptions`
            and its base class, which describe them.

    Attributes:
        seed: of the keys.

    Raises:
        TypeError: if `loss_fn` does not take three arguments, or four, `optimizer` is none, or there is no such option.
        ValueError: if an option is out of range, or two of them exclude each other.
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
        """Make the parts of a step, of evaluations and of plans."""
        replicas, options = self._strategy.replicas, self._options
        check_loss_function(loss_fn)
        traced: list[Function] = [] if options.map_gradient is None else [options.map_gradient]
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
            StepRules(options.digest_every, options.own_part, flipped, rows_of),
            options.scaling,
            recorder,
        )
        self._evaluator = Evaluator(replicas, self._engine, every_row, options.own_part)
        self._memory = MemoryPlanner(replicas, loss_fn, optimizer, options)

    @property
    def notice(self) -> StepNotice:
        """The notice that travels with the gradients of every step."""
        return self._loop.notice

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replicas train."""
        return self._strategy

    @property
    def is_sharded(self) -> bool:
        """Whether instances have different parts of the state: of the optimizer's or the model's, or residuals."""
        return self._options.own_part is not None

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` wherever this instance has only a part of an array."""
        return self._engine.whole(state)

    def init(self, variables: Variables, model_state: Tree = None) -> TrainState:
        """Return the first state: instance 0's variables on every instance.

        Args:
            variables: a pytree of floating-point arrays, with the same shapes and dtypes on all instances.
            model_state: what changes with every batch and is not trained, such as moving means, counters and keys: a
                pytree of arrays of any dtype, of which all replicas begin with instance 0's. Also evaluation and
                prediction give it to their functions, as the last argument. None: there is none.

        Raises:
            TypeError: if a variable is no array of a floating-point dtype, or the loss function does not take a model
                state, or takes one that is not given.
            ValueError: if there is no variable, or one was used up by a step; or the model state does not fit to
                `model_state_aggregation`.
            LayoutMismatchError: on all instances if their variables differ in names, shapes or dtypes.
            RuntimeError: inside `strategy.run` or a loss function, as of all that trains.
        """
        refuse_in_replica("trainer.init")
        state = self.adopt(TrainState(variables, None, 0, model_state=model_state))
        self._begun_with = shapes_of((variables, model_state))
        return state

    def adopt(self, state: TrainState) -> TrainState:
        """Go on with what something else has trained: instance 0's state on every instance; a collective call.

        Args:
            state: whole, also the optimizer state, which has to be one of this optimizer's; without residuals. Loss
                scaling begins where it has none.

        Raises:
            TypeError, ValueError, LayoutMismatchError: see `init`.
        """
        check_takes_state(self._loss_fn, state.model_state is not None)
        check_variables(state.variables, self._options.trainable)
        check_model_state(state.model_state)
        given = replace(state, model_state=as_arrays(state.model_state))
        self._options.rule_of(given.model_state)

        def begun() -> TrainState:
            first: TrainState
            first, step = self._strategy.replicas.broadcast((given, np.int32(given.step)))
            return self._engine.restore(replace(first, step=int(step)))

        return self._loop.start(begun, lambda: self._engine.restore(given))

    def plan(self, batch: Batch, variables: Variables = None, model_state: Tree = None) -> MemoryPlan:
        """Return the memory that this instance will need, before anything runs; no collective call.

        It compiles the programs of a step, and asks XLA what each of them takes. `print` it, or take its `to_json`.

        Args:
            batch: one of this instance, or the shapes and dtypes of one, as `jax.ShapeDtypeStruct`.
            variables: likewise. None: those of the last `init`.
            model_state: likewise.

        Raises:
            ValueError: if there are no variables, neither given nor from `init`; or as `step` with such a batch.
            TypeError: see `step`.
        """
        if variables is not None:
            return self._memory.plan(variables, model_state, batch)
        if self._begun_with is None:
            raise ValueError("plan was called before init; call init first, or give it variables, or shapes of some")
        return self._memory.plan(*self._begun_with, batch)

    def run(
        self,
        state: TrainState,
        dataset: Iterable[Batch],
        steps_per_execution: int = 1,
        after_execution: Callable[[TrainState, Metrics], None] = lambda state, metrics: None,
    ) -> tuple[TrainState, Metrics]:
        """Make a step with every batch; `state` is used up. The same bits as of `step`.

        Nothing waits for the device before metrics are read. The only replica makes the steps of an execution without
        returning to Python if that has the same bits; the first execution finds out, and the log says so. Several
        replicas meet once in every step.

        Args:
            state: what `init`, `step` or `run` returned last.
            dataset: a `DistributedDataset`, the rest of whose epoch is read, or an iterable of batches.
            steps_per_execution: how many steps are made before `after_execution` is called, in one program where they
                can; the last time fewer if the number of batches is not a multiple of it.
            after_execution: called with the state and the metrics of the last step.

        Returns:
            The new state, and the metrics of the last step.

        Raises:
            ValueError: if there is no batch, or `steps_per_execution` is not positive; and what `step` raises.
        """
        refuse_in_replica("trainer.run")
        positive("steps_per_execution", steps_per_execution)
        check_state(state)
        if isinstance(dataset, DistributedDataset):
            dataset.restore(dataset.position())  # the rest of the epoch, not all of it
            dataset = dataset.epoch(dataset.position().epoch)
        elif self._engine.may_fuse and steps_per_execution > 1:  # the batches of an execution are there at once
            dataset = map(unchanging, dataset)
        batches, metrics = iter(dataset), None
        for batch in batches:
            rest = itertools.islice(batches, steps_per_execution - 1)
            state, metrics = self._execute(state, itertools.chain([batch], rest))
            after_execution(state, metrics)
        if metrics is None:
            raise ValueError("there is no batch to make a step with")
        return state, metrics

    def _execute(self, state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        """Make a step with each of the batches, in one program if that has the same bits."""
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
        """Make one update; `state` is used up.

        Args:
            state: what `init` or `step` returned last.
            batch: this instance's batch: a pytree whose leaves have the micro-batches of the local replicas one after
                another along their first axis.

        Returns:
            The new state, and the metrics as means over all replicas.

        Raises:
            TypeError: if the loss is not a floating-point scalar, or the batch has other leaves than arrays.
            ValueError: if the batch cannot be divided among the local replicas, has no rows, has integers of NumPy that
                JAX would cut off, is dealt out among other replicas, or has not what the loss function asks it for; or
                if the state was used up by a step.
            NonFiniteGradientError: with `check_numerics`; the state is then unchanged and still usable.
            DivergenceError: with `digest_every`.
            DisagreementError: on all instances, at the first step with batches of a shape, if they differ in the
                options, the data set, the loss function or the optimizer.
        """
        refuse_in_replica("trainer.step")
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
        """Return means over all rows of a data set, each counted once; a collective call. The state is unchanged.

        The function gets each row as a batch of one, so that a mean over rows is the mean over all of them, however
        many there are. Values are added in float64, a replica's rows one after another, then the replicas in the
        order of the tree, and batch by batch. The bits depend on the number of replicas and the batch size, and not on
        the instances.

        Args:
            state: what `init`, `step` or `run` returned last.
            dataset: a `DistributedDataset` with `remainder="pad"`, the rest of whose epoch is read; or an iterable of
                batches of this instance, of which later ones may have fewer rows than the first.
            fn: as `loss_fn`, for instance without dropout; None for `loss_fn` itself. Its key is always
                `jax.random.key(seed)`.
            metrics_fn: instead of it `(variables, batch, mask, key) -> {name: metric}` of all rows of a replica, of
                which those count whose mask, bool `[rows]`, is True. A metric is a `Mean`, or another pytree of arrays
                with a method `merge(other)`, which is called with host arrays.

        Raises:
            TypeError: if a loss or metric is no scalar, or what `metrics_fn` returns cannot be merged.
            ValueError: if there is no row, the data set leaves rows out or accumulates, batches differ in more than the
                number of rows, the function has feeds or, of single rows, collectives, or the state was used up.
            DisagreementError: on all instances, if they differ in what is evaluated.
        """
        check_state(state)
        task = evaluation_task(self._loss_fn, fn, metrics_fn, state.model_state is not None)
        return self._evaluator.evaluate(task, state, dataset)

    def predict(
        self, state: TrainState, dataset: Iterable[Batch], fn: LossFunction | None = None, *, to_all: bool = True
    ) -> Iterator[Tree]:
        """Yield the model's outputs for each row, in the order of the data; taking a batch is a collective call.

        If all instances leave the iterator early, the data set stays there.

        Args:
            state: see `evaluate`; not to be used up before the last batch is taken.
            dataset: see there; with `shuffle=False`.
            fn: `(variables, batch, key) -> outputs` or `-> Outcome`, the outputs a pytree of arrays `[rows, ...]`; None
                for a `loss_fn` that returns an `Outcome` with outputs.
            to_all: whether all instances get the outputs, as host arrays; otherwise all but instance 0 get None.

        Raises:
            TypeError, ValueError, DisagreementError: see `evaluate`; and if the data set is shuffled, or the outputs
                are not one for each row.
        """
        check_state(state)
        task = prediction_task(self._loss_fn, fn, state.model_state is not None)
        return self._evaluator.predict(task, state, dataset, to_all)

    def told(
        self, task: EvaluationTask, state: TrainState, dataset: DistributedDataset | Iterable[Batch]
    ) -> Generator[Told, None, None]:
        """Yield the results of a task for each batch; `evaluate` and `predict` are built on it."""
        check_state(state)
        return self._evaluator.told(task, state, dataset)
