"""The engine of JAX: one program per replica and step, and one update per instance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import jax
import numpy as np

from strategies.comparing.digest import flip_bit, host_arrays
from strategies.core.engine import Arrived, Buffers, Engine
from strategies.core.metrics import Metrics, UnreadArray, metrics_of
from strategies.core.rows import Begun, EvaluationTask
from strategies.data.sources import Masked
from strategies.errors import NonFiniteGradientError
from strategies.exchange.int8 import Int8Layout
from strategies.exchange.means import Bucket, Means
from strategies.exchange.shards import Shards
from strategies.gradients.arguments import Trainable
from strategies.gradients.model_state import FIRST, MEAN, PER_REPLICA, ModelStateRule
from strategies.gradients.replica_program import with_loss
from strategies.loss_scaling import LossScale
from strategies.replicas.devices import borrow
from strategies.replicas.replicas import Replicas
from strategies.replicas.shards import rows_of_replicas
from strategies.step.evaluation_program import JaxRows
from strategies.step.in_one_program import InOneProgram, StepProgram
from strategies.step.options import StepOptions
from strategies.step.preparation import PreparedStep, StepPrograms, control_of
from strategies.train_state import TrainState
from strategies.typing import Batch, Gradients, Tree
from strategies.updates.update import VariableUpdate


@dataclass
class JaxPending:
    """A step of JAX that has begun; see `PendingStep`.

    Attributes:
        step: its programs.
        state: with which it began.
        control: see `control_words`.
        notice: whether this instance was given one.
        buckets: of gradients, when they are ready.
        tail: what has travelled behind the gradients, or is still being computed.
        is_finite: whether the step may be applied.
        after: the state after a step that is made in one program; None where it is made in parts.
        kept: the new residuals and model state.
    """

    step: PreparedStep
    state: TrainState
    control: np.ndarray
    notice: bool
    buckets: Iterator[tuple[Bucket, Buffers]] = field(default_factory=lambda: iter(()))
    tail: UnreadArray = None
    is_finite: bool = True
    after: TrainState | None = None
    kept: tuple[Tree, Tree] = (None, None)

    @property
    def exchange(self) -> Means:
        """See `PendingStep`."""
        return self.step.exchange


@final
class JaxEngine(Engine[TrainState, JaxPending]):
    """Computes steps by programs of JAX; a step uses up the state with which it began.

    Args:
        replicas: where the replicas are.
        programs: of the steps.
        update: of the variables.
        options: of the step.
        is_recorded: whether every step is recorded.
    """

    def __init__(
        self,
        replicas: Replicas,
        programs: StepPrograms,
        update: VariableUpdate,
        options: StepOptions,
        is_recorded: bool,
    ) -> None:
        self._replicas = replicas
        self._programs = programs
        self._update = update
        self._options = options
        self._is_recorded = is_recorded
        self._rows = JaxRows(replicas, options, is_recorded)
        self._in_one = InOneProgram(update, options.seed, replicas.devices.executables)

    # ---- one step

    def begin(self, state: TrainState, batch: Batch, notice: bool) -> JaxPending:
        """See `Engine`."""
        step = self._programs.prepare(state, batch)
        control = control_of(state, notice)
        run = self._in_one_program(step, state, batch, control) if self._may_be_one else None
        if run is None:
            return self._begun(step, state, batch, control, notice)
        after, tail = run(state, batch, control)
        return JaxPending(step, state, control, notice, tail=tail, after=after)

    def _begun(
        self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray, notice: bool = False
    ) -> JaxPending:
        step.gradients.dispatch(*self._programs.arguments(state, batch, control))
        return JaxPending(step, state, control, notice, self._buckets(step))

    def _buckets(self, step: PreparedStep) -> Iterator[tuple[Bucket, Buffers]]:
        for bucket, contributions in step.gradients.collect():
            self._update.wait()  # the last one may still be reading the results
            yield bucket, contributions

    def arrived(self, pending: JaxPending) -> Arrived:
        """See `Engine`."""
        program = pending.step.program
        if pending.after is not None:  # nobody waits for the only replica
            return Arrived(program.names, pending.tail, float(pending.notice), True, lambda: self._means(pending))
        self._raise_if_feeds_differ()
        pending.kept = self._kept(pending.step, pending.state)
        tail = pending.tail = pending.step.gradients.tail.copy()
        if self._options.check_numerics:
            self._raise_if_not_finite(pending.state, tail[-program.flags :])
        if self._options.scaling is not None:
            pending.is_finite = bool(tail[program.finite_place] == 0)
        notice = float(tail[program.notice_place])
        return Arrived(program.names, tail, notice, pending.is_finite, lambda: self._means(pending))

    def _means(self, pending: JaxPending) -> tuple[Gradients, Shards | None]:
        return pending.step.means, self._update.mean_shards

    def update(self, pending: JaxPending, scale: LossScale | None) -> TrainState:
        """See `Engine`."""
        state, step = pending.state, pending.step
        if pending.after is not None:
            return pending.after
        if not pending.is_finite:
            return replace(state, step=state.step + 1, loss_scale=scale)
        trainable = step.program.trainable
        trained, optimizer_state = self._update.apply(
            trainable.pick(state.variables),
            state.optimizer_state,
            step.means,
            with_loss(pending.control, pending.tail),
        )
        variables = trainable.put(state.variables, trained)
        return TrainState(variables, optimizer_state, state.step + 1, scale, *pending.kept)

    def _kept(self, step: PreparedStep, state: TrainState) -> tuple[Tree, Tree]:
        """Return the new residuals and model state; a collective call where the model state has leaves of replica 0."""
        if state.residuals is None and state.model_state is None:
            return None, None
        rule, device = step.program.rule, self._replicas.variables_device
        kept = [step.program.unpack_kept(of_replica) for of_replica in step.gradients.kept()]
        residuals, of_state = zip(*kept, strict=True)
        new = {**of_state[0], **rule.arrived(state.model_state, step.state_means)}
        if new[MEAN]:
            new[MEAN] = jax.device_put(new[MEAN], device)
        if new[FIRST] and self._replicas.communicator.size > 1:  # replica 0 is on the first of the instances
            new[FIRST] = self._replicas.broadcast(new[FIRST])
        if new[PER_REPLICA]:
            new[PER_REPLICA] = self._replicas.devices.place(_joined([each[PER_REPLICA] for each in of_state]))
        return None if state.residuals is None else _joined(residuals), rule.put(state.model_state, new)

    def _raise_if_feeds_differ(self) -> None:
        """Raise if replicas have used feeds differently; their programs have ended, and the state is unchanged."""
        reducer = self._replicas.reducer
        reducer.end()
        if reducer.last_error is not None:
            raise reducer.last_error

    def _raise_if_not_finite(self, state: TrainState, flags: np.ndarray) -> None:
        if not flags.any():
            return
        leaf, replica = divmod(int(np.flatnonzero(flags)[0]), self._replicas.num_replicas_in_sync)
        path, _ = jax.tree_util.tree_leaves_with_path(self._trained(state))[leaf]
        replicas = np.flatnonzero(flags.reshape(-1, self._replicas.num_replicas_in_sync).any(axis=0)).tolist()
        raise NonFiniteGradientError(
            f"the gradient of variable {jax.tree_util.keystr(path)} on replica {replica} is not finite at step "
            f"{state.step} (first of the replicas {replicas}); the step was not applied: lower the learning rate, "
            "clip the gradients, or look at that replica's batch"
        )

    # ---- a step of the only replica in one program

    @property
    def _may_be_one(self) -> bool:
        """Whether there is one replica, and nobody looks at what happens in a step."""
        is_looked_at = self._replicas.faults.is_armed or self._is_recorded
        is_plain = self._options.may_fuse and not self._options.own_part
        return self._replicas.num_replicas_in_sync == 1 and is_plain and not is_looked_at

    def _in_one_program(
        self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray
    ) -> StepProgram | None:
        def in_parts(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return self._in_parts(step, state, batch, control)

        return self._in_one.found(step, state, batch, control, in_parts)

    def _in_parts(
        self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray
    ) -> tuple[TrainState, Metrics]:
        """Make a step whose results are compared with those of one program."""
        pending = self._begun(step, state, batch, control)
        for bucket, contributions in pending.buckets:
            pending.exchange.reduce(bucket, contributions)
        arrived = self.arrived(pending)
        return self.update(pending, state.loss_scale), metrics_of(arrived.names, arrived.tail, None)

    # ---- without training

    def tell(self, task: EvaluationTask, state: TrainState, batch: Masked) -> Begun:
        """See `Engine`."""
        return self._rows.tell(task, state, batch)

    # ---- the state

    def share(self, state: TrainState, root: int) -> TrainState:
        """See `Engine`."""
        rule = self._options.rule_of(state.model_state)
        same = self._same_everywhere(state, rule)
        parts = (same.variables, same.optimizer_state, same.loss_scale, same.model_state, np.int32(state.step))
        variables, optimizer_state, scale, model_state, step = self._replicas.broadcast(parts, root)
        return TrainState(
            variables,
            state.optimizer_state if self._update.is_sharded else optimizer_state,
            int(step),
            scale,
            state.residuals,
            rule.with_own(model_state, rule.pick(state.model_state, PER_REPLICA)),
        )

    def digest(self, state: TrainState) -> dict[str, np.ndarray]:
        """See `Engine`."""
        return host_arrays(self._same_everywhere(state, self._options.rule_of(state.model_state)))

    def _same_everywhere(self, state: TrainState, rule: ModelStateRule) -> TrainState:
        """Return the state without what instances have parts of."""
        return replace(
            state,
            residuals=None,
            optimizer_state=None if self._update.is_sharded else state.optimizer_state,
            model_state=rule.map_own(lambda leaf: None, state.model_state),
        )

    def snapshot(self, state: TrainState) -> TrainState:
        """See `Engine`: what a state is."""
        return state

    def restore(self, snapshot: TrainState) -> TrainState:
        """See `Engine`. The optimizer state of a snapshot that has none is the first one; so is its loss scale."""
        scaling, place = self._options.scaling, self._replicas.devices.place
        trained = self._trained(snapshot)
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
        optimizer_state = self._update.init(trained) if given is None else self._update.adopt(trained, given)
        return TrainState(snapshot.variables, optimizer_state, snapshot.step, scale, residuals, of_all)

    def whole(self, state: TrainState) -> TrainState:
        """Return the state with a `PartOfArray` wherever this instance has only a part of an array."""
        of_all = rows_of_replicas(self._replicas)
        return replace(
            state,
            optimizer_state=self._update.whole(state.optimizer_state),
            residuals=jax.tree.map(of_all, state.residuals),
            model_state=self._options.rule_of(state.model_state).map_own(of_all, state.model_state),
        )

    def _trained(self, state: TrainState) -> Tree:
        return Trainable.of(state.variables, self._options.trainable).pick(state.variables)


def flipped(state: TrainState) -> TrainState:
    """Return a state with a bit of a variable changed; for faults on purpose."""
    return replace(state, variables=flip_bit(state.variables))


def rows_of(batch: Batch) -> int:
    """Return the rows of a batch: the length of its longest array."""
    return max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())), default=0)


def _joined(kept: Sequence[Sequence[jax.Array]]) -> list[Tree]:
    """Join the values that replicas keep, with the replicas along the first axis."""
    if len(kept) == 1:
        return list(kept[0])
    return [np.concatenate([borrow(leaf) for leaf in leaves]) for leaves in zip(*kept, strict=True)]
