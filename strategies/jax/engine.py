"""The engine on JAX: one program per replica and step, and one update per instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NoReturn, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from strategies.core.engine import Buffers, Engine, EvaluationTask, ExchangeResult, PendingBatch
from strategies.core.metrics import Layers, Metrics, UnreadArray, layer_names
from strategies.core.options import is_weighted
from strategies.data.sources import Masked
from strategies.errors import NonFiniteGradientError
from strategies.exchange.means import Bucket
from strategies.jax.comparing.agreement import flip_bit, host_arrays
from strategies.jax.evaluation.tasks import JaxRows
from strategies.jax.fused_steps import FusedPrograms, FusedSteps
from strategies.jax.gradients.model_state import LEAST_WEIGHT, PER_REPLICA, ModelStateRule, control_words, has_own
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.on_device.step import DeviceStep, StepQueue, scaled_control
from strategies.jax.options import StepOptions
from strategies.jax.preparation import HostStep, PreparedStep, StepPrograms, control_of
from strategies.jax.programs.compilation import jit
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.sharding import unchanging
from strategies.jax.replicas.variables import PartOfArray, rows_of_replicas
from strategies.jax.shard_backups import PartedUpdate, ReadyStep, ShardBackups, receive_buffers
from strategies.jax.updates.optimizers import LearningRates
from strategies.loss_scaling import LossScale
from strategies.placeholders import fill, placeholders_like, read, zeros_for_placeholders
from strategies.typing import Batch, Gradients, Leaf, Tree
from strategies.values import TrainState


@dataclass
class JaxPending:
    """A step that has begun, on either path; it is the `PendingStep` and the `Exchange` of the loop.

    Attributes:
        step: Programs of the step.
        state: State before the step.
        control: Control words, see `control_words`.
        notice: 1 if this instance was given a notice, else 0; after the exchange, above 0 if any instance was.
        buffers: Buffers with the means on a device, once they are known.
        tail: Values that travelled behind the gradients.
        is_finite: Whether the step may be applied, as far as loss scaling checks it; on a device an unread scalar.
        is_weighted: Whether losses have a weight above 0, or no weights; if not, the step is not applied.
        model_state: New model state.
    """

    step: PreparedStep
    state: TrainState
    control: Leaf
    notice: float
    buffers: Sequence[Leaf] = ()
    tail: Leaf = None
    is_finite: Leaf = True
    is_weighted: bool = True
    model_state: Tree = None

    @property
    def buckets(self) -> Iterator[tuple[Bucket, Buffers]]:
        """Each bucket of gradients, as soon as it is ready."""
        return self.step.gradients.collect()

    @property
    def exchange(self) -> JaxPending:
        """The exchange of the buckets: the step itself."""
        return self

    def reduce(self, bucket: Bucket, contributions: Buffers) -> None:
        """Compute the means of a bucket, or begin to compute them on a device. Collective."""
        if isinstance(self.step, HostStep):
            self.step.update.wait()  # the previous update may still read the memory of the results
            self.step.exchange.reduce(bucket, contributions)
        else:
            self.buffers, self.notice = self.step.reduce(bucket, contributions, self.notice)

    def finish_exchange(self) -> ExchangeResult:
        """Return the results of the exchange; collective if the model state has leaves of replica 0."""
        step, places = self.step, self.step.program.places
        if isinstance(step, HostStep):
            self.tail = places.weighted(step.gradients.tail.copy())
            self.notice = float(self.tail[places.notice])
        else:
            self.tail = step.flat.tail_of(self.buffers[0])
        if places.has_finite:
            self.is_finite = self.tail[places.finite] == 0
        if self.state.model_state is not None:
            self.model_state = step.model_state(self.state, self.buffers, self.is_finite)
        gradients = partial(step.mean_gradients, self.buffers, self.control)
        names, scale_after = step.program.names, step.scale_after
        return ExchangeResult(names, self.tail, self.notice, self.is_finite, gradients, scale_after=scale_after)


@dataclass(frozen=True)
class FusedPending:
    """A `PendingStep` of a single replica that one program makes, without waiting for it.

    Attributes:
        step: Programs of the step.
        notice: Whether the instance was given a notice.
        after: State after the step.
        tail: Values of the metrics.
        gradients: Gradients of the step.
        buckets: Empty.
    """

    step: PreparedStep
    notice: bool
    after: TrainState
    tail: UnreadArray
    gradients: Gradients
    buckets: Iterator[tuple[Bucket, Buffers]] = field(default_factory=lambda: iter(()))

    @property
    def exchange(self) -> NoReturn:
        """No exchange: there is no bucket."""
        raise AssertionError("a step of the only replica exchanges nothing")

    def finish_exchange(self) -> ExchangeResult:
        """Return the results of the step."""
        return ExchangeResult(
            self.step.program.names, self.tail, float(self.notice), True, lambda: (self.gradients, None)
        )


JaxPendings: TypeAlias = JaxPending | FusedPending


@final
class JaxEngine(Engine[TrainState, JaxPendings]):
    """An engine that computes steps by programs of JAX; a step uses up the state before it.

    Args:
        replicas: Places of the replicas.
        programs: Programs of the steps.
        options: Options of the step.
        is_recorded: Whether every step is recorded.

    Attributes:
        may_fuse: Whether several steps may be one program: there is one replica, and nothing happens between steps.
        variable_names: Names of the trained variables for sinks of metrics, in the order of the pytree; None for their
            paths in it.
    """

    can_keep_copies = True

    def __init__(
        self,
        replicas: Replicas,
        programs: StepPrograms,
        options: StepOptions,
        is_recorded: bool,
    ) -> None:
        self._replicas = replicas
        self._programs = programs
        self._options = options
        self._is_recorded = is_recorded
        is_whole = options.pipeline is None and not has_own(options.model_state_aggregation)
        is_always_applied = options.scaling is None and not options.check_numerics  # if losses have no weights
        self._is_fused = replicas.num_replicas_in_sync == 1 and is_whole and is_always_applied
        self.may_fuse = self._is_fused and not (replicas.faults.is_armed or is_recorded or replicas.journal.is_kept)
        self.variable_names: Sequence[str] | None = None
        self._known_names: tuple[object, tuple[str, ...]] | None = None  # and what they were made of
        self._fused = FusedPrograms(options.seed)
        self._rows = JaxRows(replicas, options, is_recorded)
        self._queue = StepQueue()
        self._parts = ShardBackups(replicas, programs, options)
        self._parted = PartedUpdate(replicas, is_recorded)
        self._rates = LearningRates(programs.optimizer)

    # ---- one step

    @override
    def begin(self, state: TrainState, batch: Batch, notice: bool) -> JaxPendings:
        self._queue.await_room()
        self._parted.begin()
        step = self._programs.prepare(state, batch)
        state = self._programs.unchanging(state)
        fused = self._fused_steps(step, state, [batch])
        if fused is not None:
            if self._is_recorded or self._are_looked_at(state.step, 1):  # the variables before the step are needed
                trained = jax.tree.map(jnp.copy, step.program.trainable.pick(state.variables))
                state = replace(state, variables=step.program.trainable.put(state.variables, trained))
            return FusedPending(step, notice, *fused(state, [batch]))
        if isinstance(step, DeviceStep):
            control: Leaf = control_words(state.step, notice, 1.0)
            if state.loss_scale is not None:  # the host does not wait for it
                control = scaled_control(control, jnp.asarray(state.loss_scale.scale, jnp.float32))
            batch = unchanging(batch)
        else:
            control = control_of(state, notice)
        step.gradients.dispatch(*self._programs.arguments(state, batch, control))
        return JaxPending(step, state, control, float(notice))

    def _fused_steps(self, step: PreparedStep, state: TrainState, batches: Sequence[Batch]) -> FusedSteps | None:
        """Return the program of steps of a single replica; None if they are made in parts, or one by one."""
        is_checked = step.program.places.is_weighted  # a step without weight is not applied
        return self._fused.find(step, state, batches) if self._is_fused and not is_checked else None

    def _are_looked_at(self, first: int, count: int) -> bool:
        """Return whether norms or histograms are due in one of `count` steps, of which `first` is the first one."""
        settings = self._replicas.distributions
        return settings is not None and any(map(settings.are_due, range(first, first + count)))

    @override
    def finish_exchange(self, pending: JaxPendings) -> ExchangeResult:
        if isinstance(pending, FusedPending):
            return pending.finish_exchange()
        program, state = pending.step.program, pending.state
        if isinstance(pending.step, HostStep):
            self._raise_if_feeds_differ()
        result = pending.finish_exchange()
        if program.places.is_weighted:  # on a device, only weights and check_numerics wait for every step
            pending.is_weighted = self._is_weighted(program, state, np.asarray(result.tail))
            result = replace(result, is_weighted=pending.is_weighted)
        if self._options.check_numerics:
            self._raise_if_not_finite(state, np.asarray(result.tail)[-program.places.flags :])
        return result

    def _is_weighted(self, program: ReplicaProgram, state: TrainState, tail: np.ndarray) -> bool:
        """Return whether losses have a weight above 0; raise if they have no mean."""
        weight, zero_weight = float(tail[program.places.weight]), self._options.zero_weight
        needs_finite = program.weighs_losses
        return is_weighted(weight, state.step, zero_weight, needs_finite=needs_finite, least=LEAST_WEIGHT)

    @override
    def update(self, pending: JaxPendings, scale: LossScale | None) -> TrainState:
        if isinstance(pending, FusedPending):
            return self._queued(pending.after, pending.tail)
        return self._queued(self._updated(pending, scale), pending.tail)

    def _updated(self, pending: JaxPending, scale: LossScale | None) -> TrainState:
        step, state = pending.step, pending.state
        decides = state.held is not None or isinstance(step, HostStep)  # else the device's program decides
        if not pending.is_weighted or (decides and not bool(pending.is_finite)):
            return replace(state, step=state.step + 1, loss_scale=scale)
        trainable, model_state = step.program.trainable, pending.model_state
        buffers, control = pending.buffers, pending.control
        if state.held is not None:
            after = replace(state, step=state.step + 1, loss_scale=scale, model_state=model_state)
            arguments = step.update_arguments(buffers, control, pending.tail)
            return self._parted.apply(ReadyStep(step.update, trainable, *arguments, state, self._parts.copied(after)))
        before = trainable.pick(state.variables), state.optimizer_state
        if isinstance(step, HostStep):
            trained = step.update.apply(*before, *step.update_arguments(buffers, control, pending.tail))
        else:
            trained = step.flat.apply(*before, buffers, control)
        variables, optimizer_state = trainable.put(state.variables, trained[0]), trained[1]
        return TrainState(variables, optimizer_state, state.step + 1, scale, model_state)

    def _queued(self, state: TrainState, tail: UnreadArray) -> TrainState:
        """Return the state after a step; put the step into the queue if the host has not waited for it."""
        if isinstance(tail, jax.Array):
            self._queue.add(state.step - 1, tail)
        return state

    def _raise_if_feeds_differ(self) -> None:
        """Raise if replicas have used feeds differently. Their programs have ended, and the state is unchanged."""
        reducer = self._replicas.reducer
        reducer.end()
        if reducer.last_error is not None:
            raise reducer.last_error

    def _raise_if_not_finite(self, state: TrainState, flags: np.ndarray) -> None:
        if not flags.any():
            return
        leaf, replica = divmod(int(np.flatnonzero(flags)[0]), self._replicas.num_replicas_in_sync)
        path, _ = jax.tree_util.tree_leaves_with_path(self._programs.trained(state.variables))[leaf]
        replicas = np.flatnonzero(flags.reshape(-1, self._replicas.num_replicas_in_sync).any(axis=0)).tolist()
        raise NonFiniteGradientError(
            f"the gradient of variable {jax.tree_util.keystr(path)} on replica {replica} is not finite at step "
            f"{state.step} (first of the replicas {replicas}); the step was not applied: lower the learning rate, "
            "clip the gradients, or look at that replica's batch"
        )

    # ---- steps of a single replica in one program

    def at_once(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics, UnreadArray] | None:
        """Make several steps in one program; return None if they have to be made one by one.

        Args:
            state: State before the steps; used up, unless the result is None.
            batches: Batches of the single replica.

        Returns:
            The state and the metrics after the last step, and the metrics of each step.
        """
        if len(batches) == 1 or self._are_looked_at(state.step, len(batches)):
            return None
        step, *others = [self._programs.prepare(state, batch) for batch in batches]
        if isinstance(step, DeviceStep) or any(other is not step for other in others):
            return None
        state = self._programs.unchanging(state)
        fused = self._fused_steps(step, state, batches)
        if fused is None:
            return None
        self._replicas.instruments.step_begins(state.step)
        state, tails, _ = fused(state, batches)
        return state, Metrics(step.program.names, tails[-1]), tails

    # ---- without training

    @override
    def begin_task(self, task: EvaluationTask, state: TrainState, batch: Masked) -> PendingBatch:
        return self._rows.begin_task(task, self._parts.cut(state), batch)

    # ---- the state

    @override
    def share(self, state: TrainState, root: int) -> TrainState:
        return self._shared(state, partial(self._replicas.broadcast, root=root))

    def _shared(self, state: TrainState, send: Callable[[Tree], Tree]) -> TrainState:
        """Return the state with what `send` returns for the arrays that are the same on all instances. Collective."""
        rule = self._options.rule_of(state.model_state)
        same = self._same_everywhere(state, rule)
        parts = (same.variables, same.optimizer_state, same.loss_scale, same.model_state, np.int32(state.step))
        variables, optimizer_state, scale, model_state, step = send(receive_buffers(parts))
        own = self._parted.parts_at(int(step)) or state
        return TrainState(
            variables,
            own.optimizer_state if self._options.shards_state else optimizer_state,
            int(step),
            scale,
            rule.with_own(model_state, rule.pick(own.model_state, PER_REPLICA)),
            own.held,
        )

    @override
    def has_copies(self, state: TrainState | None = None) -> bool:
        return self._parts.is_needed if state is None else state.held is not None

    @override
    def completed(self) -> TrainState:
        return self._parted.completed()

    @override
    def fitted(self, state: TrainState) -> TrainState:
        return self._parts.fitted(state)

    @override
    def digest(self, state: TrainState) -> dict[str, np.ndarray]:
        return host_arrays(self._same_everywhere(state, self._options.rule_of(state.model_state)))

    def _same_everywhere(self, state: TrainState, rule: ModelStateRule) -> TrainState:
        """Return the state without the arrays that each instance holds only in part."""
        return replace(
            state,
            optimizer_state=None if self._options.shards_state else state.optimizer_state,
            model_state=rule.map_own(lambda leaf: None, state.model_state),
        )

    # ---- for sinks of metrics

    @override
    def layers(self, state: TrainState, pending: JaxPendings, result: ExchangeResult) -> Layers:
        paths, structure = jax.tree_util.tree_flatten_with_path(self._programs.trained(state.variables))
        chosen = None if self.variable_names is None else tuple(self.variable_names)
        if self._known_names is None or self._known_names[0] != (structure, chosen):
            of_paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
            if chosen is not None and len(chosen) != len(paths):
                raise ValueError(
                    f"variable_names has {len(chosen)} names, but {len(paths)} variables are trained: "
                    f"{', '.join(of_paths)}; give each of them a name, in this order"
                )
            self._known_names = (structure, chosen), layer_names(of_paths if chosen is None else chosen)
        names, variables = self._known_names[1], [leaf for _, leaf in paths]
        means, shards = result.gradients()

        def gathered(number: int, part: Leaf) -> np.ndarray:
            assert shards is not None
            whole = jax.ShapeDtypeStruct(variables[number].shape, part.dtype)
            return PartOfArray(part, whole, shards, self._replicas).gather(f"the gradient of {names[number]}")

        norms = None if self._replicas.variables_device.platform == "cpu" else device_norms()
        divisor = self._divisor(state, pending.step.program, pending.tail)
        return Layers(names, variables, jax.tree.leaves(means), divisor, shards, borrow, gathered, norms)

    def _divisor(self, state: TrainState, program: ReplicaProgram, tail: UnreadArray) -> UnreadArray:
        """Return the number by which the means of a step are larger than mean gradients."""
        divisor: UnreadArray = 1.0
        if state.loss_scale is not None and self._options.scaling is not None:
            divisor = state.loss_scale.scale
        if program.places.is_weighted:
            divisor = divisor * float(np.asarray(tail)[program.places.weight])
        return divisor

    @override
    def learning_rates(self, state: TrainState, steps: int) -> Callable[[int], Mapping[str, float]] | None:
        return self._rates.of(state.optimizer_state, steps)

    # ---- spares

    @override
    def placeholder_state(self, state: TrainState, step: int, wait: Callable[[], None]) -> TrainState:
        state = placeholders_like(state, wait)
        return replace(state, step=step)

    @override
    def read(self, state: TrainState) -> TrainState:
        found: TrainState = read(state)
        return found

    @override
    def fill(self, state: TrainState, values: TrainState) -> None:
        fill(replace(state, step=0), replace(values, step=0))  # the step belongs to the structure

    @override
    def hand_over(self, state: TrainState, root: int, joins: bool) -> TrainState:
        handed = self._shared(zeros_for_placeholders(state), partial(self._replicas.hand_over, root=root, joins=joins))
        return handed if joins else state

    @override
    def rehearse(self, state: TrainState, batch: Batch) -> None:
        state = self.share(state, 0)  # places arrays as `hand_over` does, for which the update is compiled
        try:
            if self._programs.prepare(state, batch).program.is_independent:
                pending = self.begin(state, batch, False)
                for bucket, contributions in pending.buckets:
                    pending.exchange.reduce(bucket, contributions)
                self.finish_exchange(pending)
                jax.block_until_ready(self.update(pending, state.loss_scale))
        finally:
            self._programs.rest()

    @property
    @override
    def facts(self) -> Mapping[str, object]:
        return self._programs.agreed

    # ---- checkpoints

    @override
    def snapshot(self, state: TrainState) -> TrainState:
        """Return the state itself, which is a `TrainState`."""
        return state

    @override
    def restore(self, snapshot: TrainState) -> TrainState:
        """Return a state from a snapshot. If it has no optimizer state or loss scale, begin with the first one."""
        scaling, place = self._options.scaling, self._replicas.devices.place
        trained = self._programs.trained(snapshot.variables)
        local = len(self._replicas.local_replicas)
        scale = snapshot.loss_scale
        if scaling is not None and scale is None:
            scale = scaling.start()
        rule = self._options.rule_of(snapshot.model_state)
        of_all = rule.map_own(lambda leaf: place(np.stack([leaf] * local)), snapshot.model_state)
        given = snapshot.optimizer_state
        update = self._programs.update_of(snapshot.variables)
        optimizer_state = update.init(trained) if given is None else update.adopt(given)
        state = TrainState(snapshot.variables, optimizer_state, snapshot.step, scale, of_all)
        return self._parts.begun(state)

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` for each array that this instance holds only in part."""
        state = self._parts.cut(state)
        of_all = rows_of_replicas(self._replicas)
        return replace(
            state,
            optimizer_state=self._programs.update_of(state.variables).whole(state.optimizer_state),
            model_state=self._options.rule_of(state.model_state).map_own(of_all, state.model_state),
        )


@cache
def device_norms() -> Callable[[Sequence[Leaf]], jax.Array]:
    """Return a function that returns the norm of each array, float32, without waiting for it."""
    return jit(lambda leaves: jnp.stack([_norm(leaf.astype(jnp.float32)) for leaf in leaves]))


def _norm(leaf: jax.Array) -> jax.Array:
    """Return the norm of an array, whose squares may be beyond the range of float32; traceable."""
    largest = jnp.max(jnp.abs(leaf), initial=0.0)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    return jnp.sqrt(jnp.sum(jnp.square(leaf / unit))) * unit


def flipped(state: TrainState) -> TrainState:
    """Return a state with one bit of a variable flipped, for planted faults."""
    return replace(state, variables=flip_bit(state.variables))
