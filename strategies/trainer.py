"""The training step: gradients per replica, one ordered all-reduce, one update per instance."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from popdist.environments.faults import FaultyProgress
from strategies.accumulation import AccumulationDtype, GradientAccumulationReductionMethod
from strategies.agreement import insist_on_agreement, terms_of
from strategies.arguments import check_loss_function, check_optimizer, check_state, check_variables
from strategies.compilation import explain_recompilation
from strategies.datasets import DistributedDataset
from strategies.devices import borrow
from strategies.digest import compare, flip_bit
from strategies.errors import NonFiniteGradientError
from strategies.executions import Executions
from strategies.gradients import Allocate, Bucket, GradientPlan, GradientPrograms
from strategies.loss_scaling import LossScale, LossScaling
from strategies.metrics import Metrics
from strategies.notice import Notice
from strategies.probing import batch_like, variables_like
from strategies.program_text import lines_of
from strategies.recomputation import recomputing
from strategies.replica_program import Accumulation, LossFunction, Precision, ReplicaProgram, control_words, float_dtype
from strategies.sharded_update import ShardedUpdate
from strategies.sharding import at_least, positive
from strategies.shards import PartOfArray, Shards
from strategies.step_record import recorder_for
from strategies.strategy import Strategy
from strategies.survival import gather_steps, lost_with_an_instance, surviving, warn_of_loss
from strategies.train_state import TrainState
from strategies.transfer import Int8Layout, Int8Reduction, Transfer
from strategies.updates import Update, UpdateSettings

logger = logging.getLogger(__name__)

__all__ = ["LossFunction", "Metrics", "TrainState", "Trainer"]


@dataclass(frozen=True)
class _Plan:
    """What replicas compute in a step, however many of them are here; without memory for gradients.

    Attributes:
        program: of a replica.
        gradients: the compiled programs that compute it.
        lines: what they compute, for the comparison with other instances; none where there is none.
    """

    program: ReplicaProgram
    gradients: GradientPlan
    lines: Sequence[str]


@dataclass(frozen=True)
class _Step:
    """A step for the shapes of one batch.

    Attributes:
        plan: what is compiled.
        gradients: computes it on all local replicas.
        means: where the mean gradients are, as a pytree like the variables.
        quantised: adds up quantised gradients, and where to; None where they are not.
    """

    plan: _Plan
    gradients: GradientPrograms
    means: Any
    quantised: tuple[Int8Reduction, np.ndarray] | None = None

    @property
    def program(self) -> ReplicaProgram:
        """What a replica computes."""
        return self.plan.program


class Trainer:
    """Trains variables on all replicas of a strategy.

    Each step runs `loss_fn` once per replica; the gradients leave XLA as views of its memory, one flat buffer per
    dtype with the metrics in its tail; the buffers are added in replica order; one compiled update per instance applies
    their mean. The variables have the same bits on every instance, and for every number of instances.

    Args:
        strategy: where the replicas are.
        loss_fn: `(variables, batch, key) -> loss` or `-> (loss, {name: scalar})` for one replica and one micro-batch;
            the loss is a scalar, the key differs for each replica, step and micro-batch.
        optimizer: an optax gradient transformation.
        seed: of the keys.
        check_numerics: raise `NonFiniteGradientError` for the first gradient that is NaN or infinite.
        digest_every: compare the bits of variables and optimizer state between instances before every so many steps,
            and raise `DivergenceError` where they differ; under `poprun --on-failure shrink` an instance that differs
            from most gets theirs instead. 0: never. What instances have parts of is not compared: sharded optimizer
            state, and residuals.
        gradient_accumulation_count: micro-batches of each replica for one update. A replica's rows of the batch are
            its micro-batches one after another (`distribute_dataset(gradient_accumulation_count=...)`), and instances
            exchange gradients once per update.
        gradient_accumulation_dtype: of the accumulators, and of the gradients that the optimizer gets: None for the
            variable's, a dtype, or a function of the variable.
        reduction_method: how micro-batches are reduced: SUM, MEAN or RUNNING_MEAN, see
            `GradientAccumulationReductionMethod`. Over replicas gradients are always averaged.
        replicated_optimizer_state_sharding: every replica keeps 1/R of the optimizer state and updates that, and the
            new variables are gathered; the same bits. For optimizers that compute element by element. None: as
            `offload_optimizer_state`.
        min_elements_for_sharding: the state of smaller variables stays whole.
        offload_optimizer_state: keep optimizer state in host memory between updates (JAX's memory kind
            `pinned_host`). None: as the runtime likes, which is False.
        compute_dtype: bfloat16 or float16: variables and batches are cast to it for `loss_fn`; gradients, updates and
            the variables themselves keep their dtype.
        loss_scaling: None, "dynamic", a number for a scale that stays, or a `LossScaling`. A step with a gradient
            that is not finite on any replica changes nothing on all of them but the scale; the metrics get
            "loss_scale" and "skipped_steps".
        gradient_transfer_dtype: float16 or bfloat16: gradients travel in it, half as many bytes as float32, and are
            added in replica order in float32. int8: a quarter, with error feedback; see `strategies.transfer`.
        stochastic_rounding: of the sum of a 16-bit variable and its change.
        recompute: what of the forward pass is computed again for the backward pass: "none", "blocks" (what lies
            between `recomputation_checkpoint`s) or a policy of `jax.checkpoint_policies`.
        compile_ahead: changes nothing any more: programs of a replica are the same however many of them an instance
            drives, so nothing is compiled after the loss of an instance.

    Attributes:
        seed: of the keys.
        notice: travels with the gradients of every step.

    Raises:
        TypeError: if `loss_fn` does not take three arguments, or `optimizer` is none.
        ValueError: if an argument is out of range, or two of them exclude each other.
    """

    def __init__(
        self,
        strategy: Strategy,
        loss_fn: LossFunction,
        optimizer: optax.GradientTransformation,
        seed: int = 0,
        check_numerics: bool = False,
        digest_every: int = 0,
        *,
        gradient_accumulation_count: int = 1,
        gradient_accumulation_dtype: AccumulationDtype = None,
        reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.MEAN,
        replicated_optimizer_state_sharding: bool | None = False,
        min_elements_for_sharding: int = 32,
        offload_optimizer_state: bool | None = None,
        compute_dtype: Any = None,
        loss_scaling: LossScaling | float | str | None = None,
        gradient_transfer_dtype: Any = None,
        stochastic_rounding: bool = False,
        recompute: str | Callable[..., Any] = "none",
        compile_ahead: bool = False,
    ) -> None:
        check_loss_function(loss_fn)
        check_optimizer(optimizer)
        self._strategy = strategy
        self.seed = seed
        self.notice = Notice()
        self._loss_fn = recomputing(loss_fn, recompute)
        self._check_numerics = check_numerics
        self._digest_every = at_least(0, "digest_every", digest_every)
        self._loss_scaling = LossScaling.parse(loss_scaling)
        if check_numerics and self._loss_scaling is not None:
            raise ValueError("check_numerics raises for the gradients that loss_scaling expects; use one of them")
        self._accumulation = Accumulation(
            positive("gradient_accumulation_count", gradient_accumulation_count),
            GradientAccumulationReductionMethod.parse(reduction_method),
            gradient_accumulation_dtype,
        )
        self._precision = Precision(
            float_dtype("compute_dtype", compute_dtype),
            self._loss_scaling is not None,
        )
        self._transfer = Transfer.parse(gradient_transfer_dtype)
        settings = UpdateSettings(
            seed=seed,
            gradient_dtype=gradient_accumulation_dtype,
            unscales=self._loss_scaling is not None and not self._transfer.is_quantised,
            rounds_stochastically=stochastic_rounding,
            offloads_state=bool(offload_optimizer_state),
        )
        self._update = _update_for(
            strategy,
            optimizer,
            settings,
            replicated_optimizer_state_sharding,
            offload_optimizer_state,
            positive("min_elements_for_sharding", min_elements_for_sharding),
        )
        self._options = {
            "seed": seed,
            "check_numerics": check_numerics,
            "digest_every": digest_every,
            "gradient_accumulation_count": gradient_accumulation_count,
            "gradient_accumulation_dtype": _named(gradient_accumulation_dtype),
            "reduction_method": self._accumulation.method.name,
            "replicated_optimizer_state_sharding": self._update.is_sharded,
            "min_elements_for_sharding": min_elements_for_sharding,
            "offload_optimizer_state": settings.offloads_state,
            "compute_dtype": self._precision.compute,
            "loss_scaling": self._loss_scaling,
            "gradient_transfer_dtype": self._transfer.dtype,
            "stochastic_rounding": stochastic_rounding,
            "recompute": _named(recompute),
        }  # as all instances have to have them
        self._plans: dict[Any, _Plan] = {}  # for the shapes of what one replica takes
        self._executions = Executions(self._update)
        self._has_warned = False  # of what is lost with an instance
        self._claim_replicas()
        self._metrics: Metrics | None = None  # of the last step
        self._recorder = recorder_for(strategy)

    def _claim_replicas(self) -> None:
        """Take note of the local replicas."""
        self._devices = self._strategy.devices
        self._indices = [np.int32(replica) for replica in self._strategy.local_replicas]
        self._steps: dict[Any, _Step] = {}
        self._seen: list[Any] = []  # the shapes of batches for which steps were made
        # Collectives and feeds in a loss function belong to the instances for which it was traced.
        self._plans = {key: plan for key, plan in self._plans.items() if plan.program.is_independent}

    @property
    def strategy(self) -> Strategy:
        """Where the replicas are."""
        return self._strategy

    @property
    def is_sharded(self) -> bool:
        """Whether instances have different parts of the state: of the optimizer's, or residuals."""
        return self._update.is_sharded or self._transfer.is_quantised

    @property
    def _lost_with_an_instance(self) -> str | None:
        """What would be lost, in words; None where the others have everything too."""
        if not self.is_sharded:
            return None
        what = "sharded optimizer state" if self._update.is_sharded else "residuals of int8 gradients"
        return f"every instance has a part of the state that no other has ({what})"

    def share_notice(self) -> None:
        """Nothing is left to do: `notice` has travelled with the gradients."""

    def whole(self, state: TrainState) -> TrainState:
        """The state with a `PartOfArray` wherever this instance has only a part of an array."""
        shards = Shards(self._strategy.num_replicas_in_sync, len(self._indices), 1)

        def of_all(leaf: jax.Array) -> PartOfArray:
            rows = leaf.shape[0] // len(self._indices) * self._strategy.num_replicas_in_sync
            whole = jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)
            return PartOfArray(leaf, whole, shards, self._strategy)

        return replace(
            state,
            optimizer_state=self._update.whole(state.optimizer_state),
            residuals=jax.tree.map(of_all, state.residuals),
        )

    def init(self, variables: Any) -> TrainState:
        """The first state: instance 0's variables on every instance.

        Args:
            variables: a pytree of floating-point arrays, with the same shapes and dtypes on all instances.

        Raises:
            TypeError: if a variable is no array of a floating-point dtype.
            ValueError: if there is no variable, or one was used up by a step.
            LayoutMismatchError: on all instances if their variables differ in names, shapes or dtypes.
        """
        check_variables(variables)

        def catch_up() -> TrainState | None:
            self._claim_replicas()
            return self._copy_newest(self._first_state(variables, -1))

        warn_of_loss(self._strategy, self._lost_with_an_instance)
        first: TrainState = self._surviving(lambda: self._first_state(self._strategy.broadcast(variables), 0), catch_up)
        return first

    def _first_state(self, variables: Any, step: int) -> TrainState:
        scale = None if self._loss_scaling is None else self._loss_scaling.start()
        residuals = None
        if self._transfer.is_quantised:
            local = len(self._indices)
            of_one = Int8Layout.of(jax.tree.leaves(variables)).new_residuals()
            residuals = [self._devices.place(np.concatenate([np.atleast_1d(one)] * local)) for one in of_one]
        return TrainState(variables, self._update.init(variables), step, scale, residuals)

    def _surviving(self, attempt: Callable[[], Any], catch_up: Callable[[], Any]) -> Any:
        """What `attempt` returns, also where instances are lost whose part of the state others have too."""
        return attempt() if self.is_sharded else surviving(self._strategy, attempt, catch_up)

    def run(
        self,
        state: TrainState,
        dataset: Iterable[Any],
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
            if steps_per_execution > 1 and self._may_fuse:
                state, metrics = self._execute(state, [batch, *rest])
            else:
                state, metrics = self._singly(state, itertools.chain([batch], rest))
            after_execution(state, metrics)
        if metrics is None:
            raise ValueError("there is no batch to make a step with")
        return state, metrics

    @property
    def _may_fuse(self) -> bool:
        is_plain = self._loss_scaling is None and not self._transfer.is_quantised and not self._check_numerics
        if isinstance(self._strategy.progress, FaultyProgress) or self._recorder.is_on:
            return False  # faults happen in single steps, and single steps are recorded
        return is_plain and self._strategy.num_replicas_in_sync == 1

    def _execute(self, state: TrainState, batches: Sequence[Any]) -> tuple[TrainState, Metrics]:
        """Steps with all batches, in one program if that has the same bits."""
        check_state(state)
        step = self._compiled(state, batches[0])
        if len(batches) == 1 or not all(self._compiled(state, batch) is step for batch in batches):
            return self._singly(state, batches)
        self._strategy.progress.step(state.step)

        def gradients_of(state: TrainState, batch: Any) -> list[list[np.ndarray]]:
            return self._gradients_of(step.gradients, state, batch)

        state, self._metrics = self._executions.make(step.program, state, batches, self._singly, gradients_of)
        self.notice.agree(self.notice.is_given)
        return state, self._metrics

    def _singly(self, state: TrainState, batches: Iterable[Any]) -> tuple[TrainState, Metrics]:
        metrics = Metrics((), np.zeros(0, np.float32))
        for batch in batches:
            state, metrics = self.step(state, batch)
        return state, metrics

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One update; `state` is used up.

        Args:
            state: what `init` or `step` returned last.
            batch: this instance's batch: a pytree whose leaves have the micro-batches of the local replicas one after
                another along their first axis.

        Returns:
            The new state, and the metrics as means over all replicas.

        Raises:
            TypeError: if the loss is not a floating-point scalar, or the batch has other leaves than arrays.
            ValueError: if the batch cannot be divided among the local replicas, has no rows, is dealt out among other
                replicas, or has not what the loss function asks it for; or if the state was used up by a step.
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
            self._claim_replicas()
            newest = self._copy_newest(state)
            if newest is not None:
                assert self._metrics is not None
                return newest, self._metrics
            batch = self._strategy.replicas_batch(batch)
            return None

        stepped: tuple[TrainState, Metrics] = self._surviving(lambda: self._attempt(state, batch), catch_up)
        return stepped

    def _attempt(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """`_step`, with the errors of collectives inside of the loss function as they were raised."""
        reducer = self._strategy.reducer
        reducer.begin()
        try:
            return self._step(state, batch)
        except jax.errors.JaxRuntimeError as error:
            if reducer.last_error not in (None, error):
                raise reducer.last_error from error
            raise
        finally:
            reducer.end()

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if self._digest_every and state.step and state.step % self._digest_every == 0:
            state = self._compared(state)
        step = self._compiled(state, batch)
        if self._metrics is None:
            self._metrics = self._metrics_of(step, np.zeros_like(step.gradients.tail), state.loss_scale)
        control = self._control(state)
        self._begin(step.gradients, state, batch, control)
        for bucket, contributions in step.gradients.collect():
            self._update.wait()  # the last one may still be reading the results
            self._reduce(bucket, contributions, step.quantised)
        self._raise_if_feeds_differ()
        residuals = None if state.residuals is None else _joined(step.gradients.kept())
        tail = step.gradients.tail.copy()
        self.notice.agree(tail[step.program.notice_place])
        if self._check_numerics:
            self._raise_if_not_finite(state, tail[-step.program.flags :])
        variables, optimizer_state, scale = state.variables, state.optimizer_state, state.loss_scale
        is_finite = True
        if self._loss_scaling is not None:
            assert scale is not None
            is_finite = bool(tail[step.program.finite_place] == 0)
            scale = self._loss_scaling.after(scale, is_finite)
        self._recorder.reduced(state, batch, step.means, self._update.mean_shards)
        if is_finite:
            variables, optimizer_state = self._update.apply(variables, optimizer_state, step.means, control)
        else:
            residuals = state.residuals
        self._metrics = self._metrics_of(step, tail, scale)
        after = TrainState(variables, optimizer_state, state.step + 1, scale, residuals)
        self._recorder.updated(after, self._metrics)
        return after, self._metrics

    def _control(self, state: TrainState) -> np.ndarray:
        scale = 1.0 if state.loss_scale is None else float(state.loss_scale.scale)
        return control_words(state.step, self.notice.is_given, scale)

    def _metrics_of(self, step: _Step, tail: np.ndarray, scale: LossScale | None) -> Metrics:
        names = step.program.names
        if scale is None:
            return Metrics(names, tail)
        own, rest = np.split(tail, [len(names)])
        of_scale = np.array([scale.scale, scale.skipped], np.float32)
        return Metrics((*names, "loss_scale", "skipped_steps"), np.concatenate([own, of_scale, rest]))

    def _compared(self, state: TrainState) -> TrainState:
        """The state, or that of most instances where this one has other bits."""
        own = replace(state, residuals=None, optimizer_state=None if self._update.is_sharded else state.optimizer_state)
        compared: TrainState = compare(self._strategy, own, state.step)
        if self._update.is_sharded:
            compared = replace(compared, optimizer_state=state.optimizer_state)
        return replace(compared, residuals=state.residuals)

    def _copy_newest(self, state: TrainState) -> TrainState | None:
        """The state of the instances that are ahead of this one, and their metrics; None where none is.

        No instance is ahead by more than a step: it would need what the others contribute to the next one.
        """
        steps = gather_steps(self._strategy, state.step)
        newest = int(steps.max())
        if newest == steps.min():
            return None
        means = self._metrics.means if self._metrics is not None and newest else np.zeros(0, np.float32)
        variables, optimizer_state, scale, means = self._strategy.broadcast(
            (state.variables, state.optimizer_state, state.loss_scale, means), int(steps.argmax())
        )
        if state.step == newest:
            return None
        if self._metrics is not None:
            self._metrics = Metrics(self._metrics.names, np.asarray(means))
            self.notice.agree(float(self._metrics.means[len(self._metrics.names)]))
        return TrainState(variables, optimizer_state, newest, scale)

    def _begin(self, gradients: GradientPrograms, state: TrainState, batch: Any, control: np.ndarray) -> None:
        """Have the gradients of all local replicas computed."""
        parts = zip(self._devices.parts(batch), self._indices, self._devices.parts(state.residuals or []), strict=True)
        gradients.dispatch(state.variables, [(rows, index, control, residuals) for rows, index, residuals in parts])

    def _reduce(
        self,
        bucket: Bucket,
        contributions: Sequence[Sequence[np.ndarray]],
        quantised: tuple[Int8Reduction, np.ndarray] | None,
    ) -> None:
        """Have the means over all replicas in the bucket's results."""
        buffers = bucket.layout.buffers
        for number in sorted(bucket.scattered):
            self._strategy.communicator.ordered_reduce_scatter(
                contributions[number], bucket.results[number], "mean", name=f"{bucket.name}/{buffers[number].name}"
            )
        filled = [number for number, buffer in enumerate(buffers) if buffer.size and number not in bucket.scattered]
        if quantised is not None:
            reduction, means = quantised
            reduction.reduce(contributions[filled.pop()], means, name=f"{bucket.name}/payload")
        self._strategy.communicator.grouped_ordered_all_reduce(
            [contributions[number] for number in filled],
            [bucket.results[number] for number in filled],
            "mean",
            names=[f"{bucket.name}/{buffers[number].name}" for number in filled],
        )

    # ---- compiling

    def _compiled(self, state: TrainState, batch: Any) -> _Step:
        self._strategy.dealing.refuse_others(batch)
        leaves, structure = jax.tree.flatten((state.variables, batch))
        try:
            key = (structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
        except AttributeError as error:
            others = {type(leaf).__name__ for leaf in leaves if not hasattr(leaf, "dtype")}
            raise TypeError(
                f"the batch has a {' and a '.join(sorted(others))}; use arrays with the rows of all local replicas"
            ) from error
        found = self._steps.get(key)
        if found is None:
            reason = explain_recompilation(self._seen, batch)
            if reason is not None:
                logger.info(reason)
            self._seen.append(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch))
            found = self._steps[key] = self._compile(state, batch)
        return found

    def _compile(self, state: TrainState, batch: Any) -> _Step:
        shapes = (
            _shapes(state.variables),
            jax.tree.map(self._devices.replica_shape, batch),
            jax.tree.map(self._devices.replica_shape, state.residuals or []),
        )
        leaves, structure = jax.tree.flatten(shapes)
        key = structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        plan = self._plans.get(key) or self._plan(*shapes)
        self._agree(state, batch, shapes[1], plan)
        if key not in self._plans:
            self._plans[key] = self._streaming(plan, shapes, state, batch)
        plan = self._plans[key]
        self._log_effective_batch(shapes[1])
        communicator = self._strategy.communicator
        gradients = self._programs(plan.gradients, communicator.allocate)
        if plan.program.quantised is None:
            return _Step(plan, gradients, jax.tree.unflatten(jax.tree.structure(shapes[0]), gradients.means))
        result = plan.program.quantised.new_result()
        reduction = Int8Reduction(plan.program.quantised, communicator, self._strategy.num_replicas_in_sync)
        means = jax.tree.unflatten(jax.tree.structure(shapes[0]), plan.program.quantised.views(result))
        return _Step(plan, gradients, means, (reduction, result))

    def _plan(self, variables: Any, of_one: Any, residuals: Any) -> _Plan:
        """What a replica computes for such variables, rows of a batch, and residuals."""
        program = ReplicaProgram(
            self._strategy,
            self._loss_fn,
            variables,
            of_one,
            self.seed,
            self._accumulation,
            self._precision,
            self._transfer,
            self._check_numerics,
        )
        gradients = self._planned(program, (variables, of_one, residuals), streams=False)
        return _Plan(program, gradients, lines_of(gradients.equations()) if self._is_compared else [])

    def _planned(self, program: ReplicaProgram, shapes: Sequence[Any], streams: bool) -> GradientPlan:
        variables, of_one, residuals = shapes
        arguments = (variables, of_one, np.int32(0), control_words(0, False, 1.0), residuals)
        shards = None if program.quantised else self._update.mean_shards
        return GradientPlan(self._devices, program, arguments, program.results, streams, program.tail_size, shards)

    def _streaming(self, plan: _Plan, shapes: Sequence[Any], state: TrainState, batch: Any) -> _Plan:
        """The plan, with gradients that are streamed if they may be; a collective call then."""
        if plan.program.quantised is not None or not self._strategy.streams_gradients:
            return plan
        cut = self._planned(plan.program, shapes, streams=True)
        return replace(plan, gradients=cut) if self._is_streaming_exact(cut, plan.gradients, state, batch) else plan

    @property
    def _is_compared(self) -> bool:
        """Whether there are others to agree with. `poprun verify` lets them differ, and finds out what follows."""
        return self._strategy.communicator.size > 1 and not self._recorder.is_on

    def _agree(self, state: TrainState, batch: Any, of_one: Any, plan: _Plan) -> None:
        """Compare what decides the result with the other instances; a collective call, once for batches of a shape."""
        dataset = self._strategy.dataset_of(batch)
        if self._is_compared:
            means = jax.tree.unflatten(jax.tree.structure(state.variables), plan.program.means)
            update = self._update.equations(state.variables, state.optimizer_state, means, self._control(state))
            programs = {"the loss function": plan.lines, "the update": lines_of(update)}
            options = {**self._options, "step": state.step}
            terms = terms_of(options, dataset, of_one, programs, state.optimizer_state)
            insist_on_agreement(self._strategy, terms)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(self._strategy, lost_with_an_instance(plan.program.has_feeds, dataset))

    def _programs(self, plan: GradientPlan, allocate: Allocate) -> GradientPrograms:
        return GradientPrograms(self._devices, plan, allocate, self._strategy.reducer.fail)

    def _log_effective_batch(self, of_one: Any) -> None:
        leaves = jax.tree.leaves(of_one)
        if not leaves:
            return
        rows = leaves[0].shape[0]
        count, replicas = self._accumulation.count, self._strategy.num_replicas_in_sync
        micro_batch = rows // count
        logger.info(
            "effective batch %d = micro-batch %d x %d accumulated x %d replicas",
            rows * replicas,
            micro_batch,
            count,
            replicas,
        )

    def _is_streaming_exact(self, cut: GradientPlan, whole: GradientPlan, state: TrainState, batch: Any) -> bool:
        """Whether gradients have the same bits when they are streamed, on all instances.

        XLA fuses and contracts what lies in one program; cut elsewhere, some models round differently (seen with
        attention and dropout). Compared for this batch, and for random variables and batch. A collective call.
        """
        if len(cut.segments) == 1:
            return False
        streamed, at_once = self._programs(cut, np.empty), self._programs(whole, np.empty)
        probe = replace(state, variables=variables_like(state.variables, self.seed)), batch_like(batch, self.seed)
        is_same = all(
            _have_same_bits(self._gradients_of(streamed, *case), self._gradients_of(at_once, *case))
            for case in (probe, (state, batch))
        )
        is_exact = np.array([is_same], np.int8)
        self._strategy.communicator.all_reduce(is_exact, "min", name="streamed gradients have the same bits")
        if not is_exact[0]:
            logger.info("gradients are not streamed: computed in parts they would have other bits")
        return bool(is_exact[0])

    def _gradients_of(self, programs: GradientPrograms, state: TrainState, batch: Any) -> list[list[np.ndarray]]:
        self._begin(programs, state, batch, self._control(state))
        return programs.leaves()

    def _raise_if_feeds_differ(self) -> None:
        """The replicas have ended their programs, and the state is still what it was."""
        reducer = self._strategy.reducer
        reducer.end()
        if reducer.last_error is not None:
            raise reducer.last_error

    def _raise_if_not_finite(self, state: TrainState, flags: np.ndarray) -> None:
        if not flags.any():
            return
        leaf, replica = divmod(int(np.flatnonzero(flags)[0]), self._strategy.num_replicas_in_sync)
        path, _ = jax.tree_util.tree_leaves_with_path(state.variables)[leaf]
        replicas = np.flatnonzero(flags.reshape(-1, self._strategy.num_replicas_in_sync).any(axis=0)).tolist()
        raise NonFiniteGradientError(
            f"the gradient of variable {jax.tree_util.keystr(path)} on replica {replica} is not finite at step "
            f"{state.step} (first of the replicas {replicas}); the step was not applied: lower the learning rate, "
            "clip the gradients, or look at that replica's batch"
        )


def _named(option: Any) -> str:
    """An option that may be a function, of which only the name is the same on all instances."""
    return str(getattr(option, "__qualname__", type(option).__qualname__) if callable(option) else option)


def _shapes(variables: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), variables)


def _joined(kept: Sequence[Sequence[jax.Array]]) -> list[Any]:
    """What replicas keep, with all of them along the first axis."""
    if len(kept) == 1:
        return list(kept[0])
    return [np.concatenate([borrow(leaf) for leaf in leaves]) for leaves in zip(*kept, strict=True)]


def _have_same_bits(one: Sequence[Sequence[np.ndarray]], other: Sequence[Sequence[np.ndarray]]) -> bool:
    """Whether the gradients of all replicas are the same to the last bit."""
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(mine.tobytes() == theirs.tobytes() for mine, theirs in pairs)


def _update_for(
    strategy: Strategy,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    shards_state: bool | None,
    offloads_state: bool | None,
    min_elements: int,
) -> Update:
    """The update with whole or with sharded optimizer state."""
    if shards_state and offloads_state is False:
        raise ValueError(
            "replicated_optimizer_state_sharding=True with offload_optimizer_state=False: the optimizer state must be "
            "offloaded to be sharded, as in the original; leave offload_optimizer_state out or make it True"
        )
    if offloads_state if shards_state is None else shards_state:
        return ShardedUpdate(strategy, optimizer, settings, min_elements)
    return Update(strategy, optimizer, settings)
