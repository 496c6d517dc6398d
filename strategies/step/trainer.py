"""The training step: gradients per replica, one ordered all-reduce, one update per instance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Unpack

import jax
import numpy as np
import optax

from strategies.data.datasets import DistributedDataset
from strategies.exchange.transfer import Int8Layout
from strategies.membership import surviving, warn_of_loss
from strategies.numbers import positive
from strategies.roles import Batch, Tree, Variables
from strategies.step.arguments import (
    check_loss_function,
    check_optimizer,
    check_state,
    check_takes_state,
    check_variables,
)
from strategies.step.digest import flip_bit
from strategies.step.evaluation import Evaluator
from strategies.step.evaluation_program import MetricsFunction
from strategies.step.executions import Executions
from strategies.step.jax_engine import JaxEngine
from strategies.step.merging import Evaluation
from strategies.step.metrics import Metrics
from strategies.step.model_state import as_arrays, check_model_state, has_own
from strategies.step.notice import Notice
from strategies.step.options import Options, StepOptions
from strategies.step.replica_program import LossFunction
from strategies.step.sharded_update import ShardedUpdate
from strategies.step.shards import PartOfArray, Shards
from strategies.step.single_step import SingleStep
from strategies.step.step_record import recorder_for
from strategies.step.trainable import Trainable
from strategies.step.updates import Update, WholeUpdate
from strategies.strategy import Strategy
from strategies.train_state import TrainState

__all__ = ["LossFunction", "Metrics", "TrainState", "Trainer"]


class Trainer:
    """Trains variables on all replicas of a strategy.

    Each step runs `loss_fn` once per replica; the gradients leave XLA as views of its memory, one flat buffer per
    dtype with the metrics in its tail; the buffers are added in replica order; one compiled update per instance applies
    their mean. The variables have the same bits on every instance, and for every number of instances.

    Args:
        strategy: where the replicas are.
        loss_fn: `(variables, batch, key) -> loss`, `-> (loss, {name: scalar})` or `-> Outcome` for one replica and one
            micro-batch; the loss is a scalar, the key differs for each replica, step and micro-batch. With a model
            state `(variables, batch, key, model_state) -> Outcome`, which has the new one.
        optimizer: an optax gradient transformation.
        seed: of the keys.
        check_numerics: raise `NonFiniteGradientError` for the first gradient that is NaN or infinite.
        digest_every: compare the bits of variables and optimizer state between instances before every so many steps.
        options: the others, by name: `gradient_accumulation_count`, `compute_dtype`, ... See `StepOptions`, where
            all of them are described.

    Attributes:
        seed: of the keys.
        notice: travels with the gradients of every step.

    Raises:
        TypeError: if `loss_fn` does not take three arguments, or four, `optimizer` is none, or there is no such option.
        ValueError: if an option is out of range, or two of them exclude each other.
    """

    def __init__(
        self,
        strategy: Strategy,
        loss_fn: LossFunction,
        optimizer: optax.GradientTransformation,
        seed: int = 0,
        check_numerics: bool = False,
        digest_every: int = 0,
        **options: Unpack[Options],
    ) -> None:
        check_loss_function(loss_fn)
        check_optimizer(optimizer)
        self._options = StepOptions(seed, check_numerics, digest_every, **options)
        self.seed = seed
        self.notice = Notice()
        self._strategy = strategy
        self._loss_fn = loss_fn
        self._update = _update_for(strategy, optimizer, self._options)
        recorder = recorder_for(strategy, self._options)
        engine = JaxEngine(strategy, loss_fn, self._options, self._update, recorder.is_on)
        self._single = SingleStep(strategy, engine, self._update, self._options, self.notice, recorder)
        self._executions = Executions(strategy, engine, self._update, self._single, self._options.may_fuse)
        self._evaluator = Evaluator(strategy, loss_fn, self._options, self._single, not self.is_sharded)

    @property
    def strategy(self) -> Strategy:
        """Where the replicas are."""
        return self._strategy

    @property
    def is_sharded(self) -> bool:
        """Whether instances have different parts of the state: of the optimizer's or the model's, or residuals."""
        return self._what_is_sharded is not None

    @property
    def _what_is_sharded(self) -> str | None:
        options = self._options
        kinds = {
            "sharded optimizer state": self._update.is_sharded,
            "residuals of int8 gradients": options.transfer.is_quantised,
            "model state of single replicas": has_own(options.model_state_aggregation),
        }
        return next((kind for kind, has_it in kinds.items() if has_it), None)

    def share_notice(self) -> None:
        """Nothing is left to do: `notice` has travelled with the gradients."""

    def whole(self, state: TrainState) -> TrainState:
        """The state with a `PartOfArray` wherever this instance has only a part of an array."""
        local = len(self._strategy.local_replicas)
        shards = Shards(self._strategy.num_replicas_in_sync, local, 1)

        def of_all(leaf: jax.Array) -> PartOfArray:
            rows = leaf.shape[0] // local * self._strategy.num_replicas_in_sync
            whole = jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)
            return PartOfArray(leaf, whole, shards, self._strategy)

        return replace(
            state,
            optimizer_state=self._update.whole(state.optimizer_state),
            residuals=jax.tree.map(of_all, state.residuals),
            model_state=self._options.rule_of(state.model_state).map_own(of_all, state.model_state),
        )

    def init(self, variables: Variables, model_state: Tree = None) -> TrainState:
        """The first state: instance 0's variables on every instance.

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
        """
        check_variables(variables, self._options.trainable)
        check_takes_state(self._loss_fn, model_state is not None)
        check_model_state(model_state)
        first = (variables, as_arrays(model_state))
        self._options.rule_of(first[1])

        def catch_up() -> TrainState | None:
            meeting = self._single.meet()
            return self._single.share(self._first_state(*first), meeting.newest) if meeting.is_late else None

        if self._what_is_sharded is not None:
            lost = f"every instance has a part of the state that no other has ({self._what_is_sharded})"
            warn_of_loss(self._strategy, lost)
        state: TrainState = self._surviving(
            lambda: self._first_state(*self._strategy.broadcast(first)), catch_up, self._single.share
        )
        return state

    def _first_state(self, variables: Variables, model_state: Tree) -> TrainState:
        scaling, place = self._options.scaling, self._strategy.devices.place
        trained = Trainable.of(variables, self._options.trainable).pick(variables)
        local = len(self._strategy.local_replicas)
        residuals = None
        if self._options.transfer.is_quantised:
            of_one = Int8Layout.of(jax.tree.leaves(trained)).new_residuals()
            residuals = [place(np.concatenate([np.atleast_1d(one)] * local)) for one in of_one]
        scale = None if scaling is None else scaling.start()
        rule = self._options.rule_of(model_state)
        of_all = rule.map_own(lambda leaf: place(np.stack([leaf] * local)), model_state)
        return TrainState(variables, self._update.init(trained), 0, scale, residuals, of_all)

    def run(
        self,
        state: TrainState,
        dataset: Iterable[Batch],
        steps_per_execution: int = 1,
        after_execution: Callable[[TrainState, Metrics], None] = lambda state, metrics: None,
    ) -> tuple[TrainState, Metrics]:
        """Make a step with every batch; `state` is used up. The same bits as of `step`.

        Nothing waits for the device before metrics are read. Where one instance drives all replicas and the same steps
        in one program have the same bits, which is tried out the first time, `steps_per_execution` of them run without
        returning to Python; the log says if not. Otherwise instances meet once in every step.

        Args:
            state: what `init`, `step` or `run` returned last.
            dataset: a `DistributedDataset`, the rest of whose epoch is read, or an iterable of batches.
            steps_per_execution: how many steps are made before `after_execution` is called; the last time fewer if the
                number of batches is not a multiple of it.
            after_execution: called with the state and the metrics of the last step.

        Returns:
            The new state, and the metrics of the last step.

        Raises:
            ValueError: if there is no batch, or `steps_per_execution` is not positive; and what `step` raises.
        """
        positive("steps_per_execution", steps_per_execution)
        if isinstance(dataset, DistributedDataset):
            dataset.restore(dataset.position())  # the rest of the epoch, not all of it
            dataset = dataset.epoch(dataset.position().epoch)
        batches = iter(dataset)
        metrics: Metrics | None = None
        for batch in batches:
            rest = itertools.islice(batches, steps_per_execution - 1)
            if steps_per_execution > 1 and self._executions.are_possible:
                state, metrics = self._executions.make(state, [batch, *rest], self._singly)
            else:
                state, metrics = self._singly(state, itertools.chain([batch], rest))
            after_execution(state, metrics)
        if metrics is None:
            raise ValueError("there is no batch to make a step with")
        return state, metrics

    def _singly(self, state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        metrics = Metrics((), np.zeros(0, np.float32))
        for batch in batches:
            state, metrics = self.step(state, batch)
        return state, metrics

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update; `state` is used up.

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
        check_state(state)
        self._strategy.progress.step(state.step)
        if self._strategy.progress.flips_bit:
            state = replace(state, variables=flip_bit(state.variables))

        def catch_up() -> tuple[TrainState, Metrics] | None:
            nonlocal batch
            meeting = self._single.meet()
            if meeting.is_late:
                newest = self._single.share(replace(state, step=state.step + 1), meeting.newest)
                assert self._single.metrics is not None
                return newest, self._single.metrics
            batch = self._strategy.replicas_batch(batch)
            return None

        stepped: tuple[TrainState, Metrics] = self._surviving(
            lambda: self._single.make(state, batch), catch_up, lambda made, root: self._single.share(made[0], root)
        )
        return stepped

    # ---- without training

    def evaluate(
        self,
        state: TrainState,
        dataset: Iterable[Batch],
        fn: LossFunction | None = None,
        *,
        metrics_fn: MetricsFunction | None = None,
    ) -> Evaluation:
        """Means over all rows of a data set, each of which counts once; a collective call. The state stays as it is.

        The function gets each row as a batch of one, so that what is a mean over rows is the mean over all of them,
        however many there are. It is added in float64, a replica's rows one after another, then replica by replica,
        and batch by batch: the bits depend on the number of replicas and the batch size, and not on the instances.

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
        return self._evaluator.evaluate(state, dataset, fn, metrics_fn)

    def predict(
        self, state: TrainState, dataset: Iterable[Batch], fn: LossFunction | None = None, *, to_all: bool = True
    ) -> Iterator[Tree]:
        """What the model says of each row, in the order of the data and batch by batch. The state stays as it is.

        Taking a batch is a collective call. Where all instances leave the iterator early the data set stays there.

        Args:
            state: see `evaluate`; not to be used up before the last batch is taken.
            dataset: see `evaluate`; with `shuffle=False`.
            fn: `(variables, batch, key) -> outputs` or `-> Outcome`, the outputs a pytree of arrays `[rows, ...]`; None
                for a `loss_fn` that returns an `Outcome` with outputs.
            to_all: whether all instances get the outputs; otherwise instance 0 does, and the others get None.

        Returns:
            For each batch the outputs for the rows of all replicas, as host arrays `[rows, ...]`.

        Raises:
            TypeError, ValueError, DisagreementError: see `evaluate`; and if the data set is shuffled, or the outputs
                are not one for each row.
        """
        return self._evaluator.predict(state, dataset, fn, to_all)

    # ---- with those who are left

    def _surviving(
        self, attempt: Callable[[], Any], catch_up: Callable[[], Any], share: Callable[[Any, int], object]
    ) -> Any:
        """What `attempt` returns, also where instances are lost whose part of the state others have too."""
        return attempt() if self.is_sharded else surviving(self._strategy, attempt, catch_up, share)


def _update_for(strategy: Strategy, optimizer: optax.GradientTransformation, options: StepOptions) -> Update:
    """The update with whole or with sharded optimizer state."""
    if options.shards_state:
        return ShardedUpdate(strategy, optimizer, options.of_update, options.min_elements_for_sharding)
    return WholeUpdate(strategy, optimizer, options.of_update)
