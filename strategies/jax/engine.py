"""The engine on JAX: one program per replica and step, and one update per instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, TypeAlias, final

import jax
import numpy as np
from typing_extensions import override

from strategies.core.distributions import Layers
from strategies.core.engine import Arrived, Buffers, Engine
from strategies.core.metrics import Metrics, UnreadArray
from strategies.core.rows import Begun, EvaluationTask
from strategies.core.weights import is_weighted
from strategies.data.sources import Masked
from strategies.errors import NonFiniteGradientError
from strategies.exchange.int8 import Int8Layout
from strategies.exchange.means import Bucket, Means
from strategies.exchange.shards import Shards
from strategies.jax.comparing.digest import flip_bit, host_arrays
from strategies.jax.evaluation_program import JaxRows
from strategies.jax.fused_steps import FusedPrograms, Made
from strategies.jax.gradients.model_state import FIRST, MEAN, PER_REPLICA, ModelStateRule, has_own
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.gradients.tail import LEAST_WEIGHT
from strategies.jax.held_parts import HeldParts, rooms
from strategies.jax.layers import JaxLayers
from strategies.jax.on_device.queue import StepQueue
from strategies.jax.on_device.step import DevicePending, DeviceStep
from strategies.jax.options import StepOptions
from strategies.jax.parted_update import PartedUpdate, ReadyStep
from strategies.jax.preparation import PreparedStep, StepPrograms, control_of
from strategies.jax.replicas.dealing import unchanging
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import rows_of_replicas
from strategies.jax.updates.learning_rates import LearningRates
from strategies.loss_scaling import LossScale
from strategies.placeholders import blank, read, resolve, unread
from strategies.train_state import TrainState
from strategies.typing import Batch, Gradients, Leaf, Tree


@dataclass
class JaxPending:
    """A `PendingStep` of JAX, whose gradients go through the host.

    Attributes:
        step: Programs of the step.
        state: State before the step.
        control: Control words, see `control_words`.
        buckets: Buckets of gradients, each as soon as it is ready.
        tail: Values that travelled behind the gradients; the device may still compute them.
        is_applied: Whether the step may be applied: gradients are finite, and losses have weight.
        kept: New residuals and model state.
    """

    step: PreparedStep
    state: TrainState
    control: np.ndarray
    buckets: Iterator[tuple[Bucket, Buffers]]
    tail: UnreadArray = None
    is_applied: bool = True
    kept: tuple[Tree, Tree] = (None, None)

    @property
    def exchange(self) -> Means:
        """The exchange of the step's buckets."""
        return self.step.exchange


@dataclass(frozen=True)
class FusedPending:
    """A `PendingStep` of a single replica that one program makes, without waiting for it.

    Attributes:
        names: Names of the metrics.
        tail: Values of the metrics.
        notice: Whether the instance was given a notice.
        after: State after the step.
        buckets: Empty.
    """

    names: tuple[str, ...]
    tail: UnreadArray
    notice: bool
    after: TrainState
    buckets: Iterator[tuple[Bucket, Buffers]] = field(default_factory=lambda: iter(()))

    @property
    def exchange(self) -> NoReturn:
        """No exchange: there is no bucket."""
        raise AssertionError("a step of the only replica exchanges nothing")

    @property
    def arrived(self) -> Arrived:
        """The metrics and the notice, without gradients: recorded steps are never made in one program."""
        return Arrived(self.names, self.tail, float(self.notice), True, lambda: ({}, None))


JaxPendings: TypeAlias = JaxPending | DevicePending | FusedPending


@final
class JaxEngine(Engine[TrainState, JaxPendings]):
    """An engine that computes steps by programs of JAX; a step uses up the state before it.

    Args:
        replicas: Places of the replicas.
        programs: Programs of the steps.
        options: Options of the step.
        is_recorded: Whether every step is recorded.

    Attributes:
        may_fuse: Whether a step may be one program: there is one replica, and no record or fault needs values in
            between.
        of_layers: The layers of a step, for sinks of metrics.
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
        is_looked_at = replicas.faults.is_armed or is_recorded or replicas.journal.is_kept
        is_plain = options.may_fuse and not has_own(options.model_state_aggregation)
        self.may_fuse = replicas.num_replicas_in_sync == 1 and is_plain and not is_looked_at
        self.of_layers = JaxLayers(replicas, programs, options)
        self._fused = FusedPrograms(programs, options.seed)
        self._rows = JaxRows(replicas, options, is_recorded)
        self._queue = StepQueue()
        self._parts = HeldParts(replicas, programs, options)
        self._parted = PartedUpdate(replicas, is_recorded)
        self._rates = LearningRates(programs.optimizer)

    # ---- one step

    @override
    def begin(self, state: TrainState, batch: Batch, notice: bool) -> JaxPendings:
        self._queue.await_room()
        self._parted.begin()
        step = self._programs.prepare(state, batch)
        state = self._programs.unchanging(state)
        if isinstance(step, DeviceStep):
            return self._begun_on_device(step, state, batch, notice)
        may_fuse = self.may_fuse and not step.program.places.is_weighted and not self._are_looked_at(state.step)
        made = self._fused.made(step, state, [batch], self._in_parts) if may_fuse else None
        if made is not None:
            return FusedPending(step.program.names, made[1], notice, made[0])
        return self._begun(step, state, batch, control_of(state, notice))

    def _are_looked_at(self, first: int, count: int = 1) -> bool:
        """Return whether norms or histograms are due in one of `count` steps, of which `first` is the first one."""
        settings = self._replicas.distributions
        return settings is not None and any(map(settings.are_due, range(first, first + count)))

    def _begun_on_device(self, step: DeviceStep, state: TrainState, batch: Batch, notice: bool) -> JaxPendings:
        may_fuse = self.may_fuse and not step.program.places.is_weighted and not self._are_looked_at(state.step)
        if may_fuse and not self._replicas.devices.is_cpu:
            made = self._fused.on_device(step, state, batch)
            if made is not None:
                return FusedPending(step.program.names, made[1], notice, made[0])

        def arguments(control: Leaf) -> tuple[Tree, Sequence[Tree], Tree]:
            return self._programs.arguments(state, unchanging(batch), control)

        return DevicePending.begun(step, state, notice, arguments)

    def _begun(self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray) -> JaxPending:
        step.gradients.dispatch(*self._programs.arguments(state, batch, control))
        return JaxPending(step, state, control, self._buckets(step))

    def _buckets(self, step: PreparedStep) -> Iterator[tuple[Bucket, Buffers]]:
        for bucket, contributions in step.gradients.collect():
            step.update.wait()  # the previous update may still read the memory of the results
            yield bucket, contributions

    @override
    def arrived(self, pending: JaxPendings) -> Arrived:
        if isinstance(pending, FusedPending):
            return pending.arrived
        if isinstance(pending, DevicePending):
            return self._arrived_on_device(pending)
        step, state = pending.step, pending.state
        program = step.program
        self._raise_if_feeds_differ()
        if state.residuals is not None or state.model_state is not None:
            pending.kept = self._kept(step, state)
        tail = pending.tail = program.places.weighted(step.tail.copy())
        is_weighted = self._is_weighted(program, state, tail)
        if self._options.check_numerics:
            self._raise_if_not_finite(state, tail[-program.places.flags :])
        is_finite = self._options.scaling is None or bool(tail[program.places.finite] == 0)
        pending.is_applied = is_weighted and is_finite
        notice = float(tail[program.places.notice])
        return Arrived(program.names, tail, notice, is_finite, lambda: self._means(pending), is_weighted)

    def _arrived_on_device(self, pending: DevicePending) -> Arrived:
        arrived, program = pending.arrived(), pending.step.program
        if program.places.is_weighted:  # only weights and check_numerics wait for every step
            pending.is_weighted = self._is_weighted(program, pending.state, np.asarray(arrived.tail))
            arrived = replace(arrived, is_weighted=pending.is_weighted)
        if self._options.check_numerics:
            self._raise_if_not_finite(pending.state, np.asarray(arrived.tail)[-program.places.flags :])
        return arrived

    def _is_weighted(self, program: ReplicaProgram, state: TrainState, tail: np.ndarray) -> bool:
        """Return whether losses have a weight above 0, or no weights; raise if they have no mean."""
        if not program.places.is_weighted:
            return True
        weight, zero_weight = float(tail[program.places.weight]), self._options.zero_weight
        needs_finite = program.weighs_losses
        return is_weighted(weight, state.step, zero_weight, needs_finite=needs_finite, least=LEAST_WEIGHT)

    def _means(self, pending: JaxPending) -> tuple[Gradients, Shards | None]:
        return pending.step.means, pending.step.update.mean_shards

    @override
    def update(self, pending: JaxPendings, scale: LossScale | None) -> TrainState:
        if isinstance(pending, FusedPending):
            return self._queued(pending.after, pending.tail)
        if isinstance(pending, DevicePending):
            return self._queued(self._updated_on_device(pending, scale), pending.tail)
        state, step = pending.state, pending.step
        if not pending.is_applied:
            return replace(state, step=state.step + 1, loss_scale=scale)
        trainable = step.program.trainable
        if state.held is not None:
            control = step.program.places.with_means(pending.control, pending.tail)
            return self._parted_update(step, state, step.arrived_means, control, scale, pending.kept)
        trained, optimizer_state = step.update.apply(
            trainable.pick(state.variables),
            state.optimizer_state,
            step.arrived_means,
            step.program.places.with_means(pending.control, pending.tail),
        )
        variables = trainable.put(state.variables, trained)
        return TrainState(variables, optimizer_state, state.step + 1, scale, *pending.kept)

    def _updated_on_device(self, pending: DevicePending, scale: LossScale | None) -> TrainState:
        state = pending.state
        if not pending.is_weighted:
            return replace(state, step=state.step + 1, loss_scale=scale)
        if state.held is None:
            return pending.updated(scale)
        means, _, control = pending.step.flat.unpacked(pending.means, pending.control)
        if not bool(pending.is_finite):
            return replace(state, step=state.step + 1, loss_scale=scale)
        return self._parted_update(pending.step, state, means, control, scale, (None, pending.model_state()))

    def _parted_update(
        self,
        step: PreparedStep | DeviceStep,
        before: TrainState,
        means: Gradients,
        control: Leaf,
        scale: LossScale | None,
        kept: tuple[Tree, Tree],
    ) -> TrainState:
        residuals, model_state = kept
        after = replace(before, step=before.step + 1, loss_scale=scale, residuals=residuals, model_state=model_state)
        after = self._parts.copied(after)
        return self._parted.apply(ReadyStep(step.update, step.program.trainable, means, control, before, after))

    def _queued(self, state: TrainState, tail: UnreadArray) -> TrainState:
        """Return the state after a step; put the step into the queue if the host has not waited for it."""
        if isinstance(tail, jax.Array):
            self._queue.add(state.step - 1, tail)
        return state

    def _kept(self, step: PreparedStep, state: TrainState) -> tuple[Tree, Tree]:
        """Return the new residuals and model state. Collective if some leaves of the model state are replica 0's."""
        rule, device = step.program.rule, self._replicas.variables_device
        kept = [step.program.unpack_kept(of_replica) for of_replica in step.gradients.kept()]
        residuals, of_state = zip(*kept, strict=True)
        new = {**of_state[0], **rule.arrived(state.model_state, step.state_means)}
        if new[MEAN]:
            new[MEAN] = jax.device_put(new[MEAN], device)
        if new[FIRST] and self._replicas.communicator.size > 1:  # replica 0 is on the first instance
            new[FIRST] = self._replicas.broadcast(new[FIRST])
        if new[PER_REPLICA]:
            new[PER_REPLICA] = self._replicas.devices.place(_joined([each[PER_REPLICA] for each in of_state]))
        return None if state.residuals is None else _joined(residuals), rule.put(state.model_state, new)

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
        if step.program.places.is_weighted:  # a step without weight has to end them
            return None
        self._replicas.instruments.step_begins(state.step)
        state = self._programs.unchanging(state)
        made = self._fused.made(step, state, batches, self._in_parts)
        if made is None:
            return None
        state, tails = made
        return state, Metrics(step.program.names, tails[-1]), tails

    def _in_parts(self, step: PreparedStep, state: TrainState, batches: Sequence[Batch]) -> Made:
        """Make steps whose results are compared with the results of one program."""
        tails = []
        self._replicas.reducer.begin()
        for batch in batches:
            pending = self._begun(step, state, batch, control_of(state))
            for bucket, contributions in pending.buckets:
                pending.exchange.reduce(bucket, contributions)
            tails.append(np.asarray(self.arrived(pending).tail))
            state = self.update(pending, state.loss_scale)
        return state, tails[0] if len(tails) == 1 else np.stack(tails)

    # ---- without training

    @override
    def tell(self, task: EvaluationTask, state: TrainState, batch: Masked) -> Begun:
        return self._rows.tell(task, self._parts.cut(state), batch)

    # ---- the state

    @override
    def share(self, state: TrainState, root: int) -> TrainState:
        return self._shared(state, partial(self._replicas.broadcast, root=root))

    def _shared(self, state: TrainState, send: Callable[[Tree], Tree]) -> TrainState:
        """Return the state with what `send` returns for the arrays that are the same on all instances. Collective."""
        rule = self._options.rule_of(state.model_state)
        same = self._same_everywhere(state, rule)
        parts = (same.variables, same.optimizer_state, same.loss_scale, same.model_state, np.int32(state.step))
        variables, optimizer_state, scale, model_state, step = send(rooms(parts))
        own = self._parted.parts_at(int(step)) or state
        return TrainState(
            variables,
            own.optimizer_state if self._options.shards_state else optimizer_state,
            int(step),
            scale,
            own.residuals,
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
            residuals=None,
            optimizer_state=None if self._options.shards_state else state.optimizer_state,
            model_state=rule.map_own(lambda leaf: None, state.model_state),
        )

    # ---- for sinks of metrics

    @override
    def layers(self, state: TrainState, pending: JaxPendings, arrived: Arrived) -> Layers:
        assert not isinstance(pending, FusedPending)  # a step that is looked at is never made in one program
        return self.of_layers.of(state, pending.step.program, pending.tail, arrived)

    @override
    def learning_rates(self, state: TrainState, steps: int) -> Callable[[int], Mapping[str, float]] | None:
        return self._rates.of(state.optimizer_state, steps)

    # ---- spares

    @override
    def unread(self, state: TrainState, step: int, wait: Callable[[], None]) -> TrainState:
        state = unread(state, wait)
        return replace(state, step=step)

    @override
    def read(self, state: TrainState) -> TrainState:
        found: TrainState = read(state)
        return found

    @override
    def resolve(self, state: TrainState, values: TrainState) -> None:
        resolve(replace(state, step=0), replace(values, step=0))  # the step belongs to the structure

    @override
    def hand_over(self, state: TrainState, root: int, joins: bool) -> TrainState:
        handed = self._shared(blank(state), partial(self._replicas.hand_over, root=root, joins=joins))
        return handed if joins else state

    @override
    def rehearse(self, state: TrainState, batch: Batch) -> None:
        state = self.share(state, 0)  # places arrays as `hand_over` does, for which the update is compiled
        try:
            if self._programs.is_independent(state, batch):
                pending = self.begin(state, batch, False)
                for bucket, contributions in pending.buckets:
                    pending.exchange.reduce(bucket, contributions)
                self.arrived(pending)
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
        residuals = None
        if self._options.transfer.is_quantised:
            residuals = list(map(place, Int8Layout.of(jax.tree.leaves(trained)).new_residuals(local)))
        scale = snapshot.loss_scale
        if scaling is not None and scale is None:
            scale = scaling.start()
        rule = self._options.rule_of(snapshot.model_state)
        of_all = rule.map_own(lambda leaf: place(np.stack([leaf] * local)), snapshot.model_state)
        given = snapshot.optimizer_state
        update = self._programs.update_of(snapshot.variables)
        optimizer_state = update.init(trained) if given is None else update.adopt(given)
        state = TrainState(snapshot.variables, optimizer_state, snapshot.step, scale, residuals, of_all)
        return self._parts.begun(state)

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` for each array that this instance holds only in part."""
        state = self._parts.cut(state)
        of_all = rows_of_replicas(self._replicas)
        return replace(
            state,
            optimizer_state=self._programs.update_of(state.variables).whole(state.optimizer_state),
            residuals=jax.tree.map(of_all, state.residuals),
            model_state=self._options.rule_of(state.model_state).map_own(of_all, state.model_state),
        )


def flipped(state: TrainState) -> TrainState:
    """Return a state with one bit of a variable flipped, for planted faults."""
    return replace(state, variables=flip_bit(state.variables))


def _joined(kept: Sequence[Sequence[jax.Array]]) -> list[Tree]:
    """Join the values that replicas keep, along a first axis of replicas."""
    if len(kept) == 1:
        return list(kept[0])
    return [np.concatenate([borrow(leaf) for leaf in leaves]) for leaves in zip(*kept, strict=True)]
