"""One update: gradients of the local replicas, their means over all of them, and new variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from collectives.instruments import EXCHANGE, FORWARD_BACKWARD, UPDATE
from strategies.comparing.digest import compare, flip_bit
from strategies.errors import NonFiniteGradientError
from strategies.gradients.arguments import Trainable, check_state
from strategies.gradients.model_state import FIRST, MEAN, PER_REPLICA
from strategies.gradients.replica_program import with_loss
from strategies.replicas.devices import borrow
from strategies.replicas.membership import LOSSES, SurvivorMeeting, meet, repeated
from strategies.replicas.replicas import Replicas
from strategies.step.in_one_program import InOneProgram, StepProgram
from strategies.step.jax_engine import JaxEngine, PreparedStep, control_of
from strategies.step.metrics import Metrics, StepNotice, metrics_of, tell_end
from strategies.step.options import StepOptions
from strategies.step.step_record import StepWatcher
from strategies.train_state import TrainState
from strategies.typing import Batch, Tree
from strategies.updates.update import VariableUpdate


class SingleStep:
    """Makes one step after another, with the instances that there are.

    Args:
        replicas: connects the instances.
        engine: computes the gradients.
        update: of the variables.
        options: of the step.
        notice: travels with the gradients.
        recorder: is told of every step.

    Attributes:
        metrics: of the last step; None before the first one.
    """

    def __init__(
        self,
        replicas: Replicas,
        engine: JaxEngine,
        update: VariableUpdate,
        options: StepOptions,
        notice: StepNotice,
        recorder: StepWatcher,
    ) -> None:
        self.metrics: Metrics | None = None
        self._replicas = replicas
        self._engine = engine
        self._update = update
        self._options = options
        self._notice = notice
        self._recorder = recorder
        self._in_one = InOneProgram(update, options.seed, replicas.devices.executables)

    @property
    def is_recorded(self) -> bool:
        """Whether every step is recorded."""
        return self._recorder.is_on

    def make(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """See `Trainer.step`; where instances are lost that had nothing alone, with those that are left."""
        check_state(state)
        local = len(self._replicas.local_replicas)
        self._replicas.instruments.step_begins(state.step)
        if self._replicas.faults.take_flip():
            state = replace(state, variables=flip_bit(state.variables))
        try:
            made = self._attempt(state, batch)
        except LOSSES as loss:
            if self._options.own_part:
                raise
            made = self._repeated(loss, state, batch)
        tell_end(self._replicas, batch, made[1], made[0].step, local)
        can_share = self._replicas.can_carry_on and not self._options.own_part
        self._replicas.done_so_far.complete(partial(self.share, made[0]) if can_share else None)
        return made

    def _repeated(self, loss: BaseException, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Make the step once more, on the batch of the replicas that this instance drives then."""

        def catch_up() -> tuple[TrainState, Metrics] | None:
            nonlocal batch
            made = self._catch_up(state)
            if made is None:
                batch = self._replicas.replicas_batch(batch)
            return made

        return repeated(self._replicas, loss, lambda: self._attempt(state, batch), catch_up)

    def _attempt(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Make a step. Errors of collectives inside of the loss function are those that were raised there."""
        self._replicas.reducer.begin()
        with self._replicas.reducer.ending():
            return self._make(state, batch)

    def _make(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        every = self._options.digest_every
        if every and state.step and state.step % every == 0:
            state = self._compared(state)
        step = self._engine.prepare(state, batch)
        if self.metrics is None:
            self.metrics = metrics_of(step.program.names, np.zeros_like(step.gradients.tail), state.loss_scale)
        control = control_of(state, self._notice.is_given)
        run = self._in_one_program(step, state, batch, control) if self._may_be_one else None
        if run is None:
            return self._in_parts(step, state, batch, control)
        with self._replicas.instruments.during[FORWARD_BACKWARD]:
            after, tail = run(state, batch, control)
        self.take_over(metrics_of(step.program.names, tail, None))
        assert self.metrics is not None
        return after, self.metrics

    def _in_one_program(
        self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray
    ) -> StepProgram | None:
        def in_parts(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return self._in_parts(step, state, batch, control)

        return self._in_one.found(step, state, batch, control, in_parts)

    @property
    def _may_be_one(self) -> bool:
        """Whether there is one replica, and nobody looks at what happens in a step."""
        is_looked_at = self._replicas.faults.is_armed or self._recorder.is_on
        is_plain = self._options.may_fuse and not self._options.own_part
        return self._replicas.num_replicas_in_sync == 1 and is_plain and not is_looked_at

    def _in_parts(
        self, step: PreparedStep, state: TrainState, batch: Batch, control: np.ndarray
    ) -> tuple[TrainState, Metrics]:
        """Gradients, their means, and the update, one after another."""
        instruments = self._replicas.instruments
        with instruments.during[FORWARD_BACKWARD]:
            self._engine.begin(step, state, batch, control)
        for bucket, contributions in instruments.each(FORWARD_BACKWARD, self._engine.collect(step)):
            with instruments.during[EXCHANGE]:
                self._update.wait()  # the last one may still be reading the results
                step.exchange.reduce(bucket, contributions)
        self._raise_if_feeds_differ()
        residuals, model_state = self._kept(step, state)
        tail = step.gradients.tail.copy()
        self._notice.agree(tail[step.program.notice_place])
        if self._options.check_numerics:
            self._raise_if_not_finite(state, tail[-step.program.flags :])
        variables, optimizer_state, scale = state.variables, state.optimizer_state, state.loss_scale
        is_finite = True
        if self._options.scaling is not None:
            assert scale is not None
            is_finite = bool(tail[step.program.finite_place] == 0)
            scale = self._options.scaling.after(scale, is_finite)
        self._recorder.reduced(state, batch, step.means, self._update.mean_shards)
        if is_finite:
            trained = step.program.trainable.pick(variables)
            with instruments.during[UPDATE]:
                trained, optimizer_state = self._update.apply(
                    trained, optimizer_state, step.means, with_loss(control, tail)
                )
            variables = step.program.trainable.put(variables, trained)
        else:
            residuals, model_state = state.residuals, state.model_state
        self.metrics = metrics_of(step.program.names, tail, scale)
        after = TrainState(variables, optimizer_state, state.step + 1, scale, residuals, model_state)
        self._recorder.updated(after, self.metrics)
        return after, self.metrics

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

    def meet(self) -> SurvivorMeeting:
        """After a loss, on all instances that are left; see `membership.meet`."""
        self._engine.claim_replicas()
        return meet(self._replicas)

    def _catch_up(self, state: TrainState) -> tuple[TrainState, Metrics] | None:
        """After a loss, on all instances that are left: what others have made of the state; None if they have not.

        Args:
            state: with which the step begins.
        """
        meeting = self.meet()
        if not meeting.is_late:
            return None
        newest = self.share(replace(state, step=state.step + 1), meeting.newest)
        assert self.metrics is not None
        return newest, self.metrics

    def share(self, state: TrainState, root: int) -> TrainState:
        """Return the state, and `metrics`, of instance `root`; a collective call.

        Args:
            state: here what `root` has; elsewhere one of the same step, whose arrays may be others.
            root: the rank.
        """
        means = self.metrics.means if self.metrics is not None and state.step else np.zeros(0, np.float32)
        variables, optimizer_state, scale, model_state, means = self._replicas.broadcast(
            (state.variables, state.optimizer_state, state.loss_scale, state.model_state, means), root
        )
        if state.step and self.metrics is not None:
            self.metrics = Metrics(self.metrics.names, np.asarray(means))
            self._notice.agree(float(self.metrics.means[len(self.metrics.names)]))
        return TrainState(variables, optimizer_state, state.step, scale, model_state=model_state)

    def take_over(self, metrics: Metrics) -> None:
        """Several steps were made otherwise; `metrics` are those of the last one."""
        self.metrics = metrics
        self._notice.agree(self._notice.is_given)

    def _compared(self, state: TrainState) -> TrainState:
        """Return the state, or that of most instances where this one has other bits."""
        rule = self._options.rule_of(state.model_state)
        mine = replace(
            state,
            residuals=None,
            optimizer_state=None if self._update.is_sharded else state.optimizer_state,
            model_state=rule.map_own(lambda leaf: None, state.model_state),
        )
        compared: TrainState = compare(self._replicas, mine, state.step)
        if self._update.is_sharded:
            compared = replace(compared, optimizer_state=state.optimizer_state)
        own = rule.pick(state.model_state, PER_REPLICA)
        return replace(compared, residuals=state.residuals, model_state=rule.with_own(compared.model_state, own))

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
        trained = Trainable.of(state.variables, self._options.trainable).pick(state.variables)
        path, _ = jax.tree_util.tree_leaves_with_path(trained)[leaf]
        replicas = np.flatnonzero(flags.reshape(-1, self._replicas.num_replicas_in_sync).any(axis=0)).tolist()
        raise NonFiniteGradientError(
            f"the gradient of variable {jax.tree_util.keystr(path)} on replica {replica} is not finite at step "
            f"{state.step} (first of the replicas {replicas}); the step was not applied: lower the learning rate, "
            "clip the gradients, or look at that replica's batch"
        )


def _joined(kept: Sequence[Sequence[jax.Array]]) -> list[Tree]:
    """Join the values that replicas keep, with the replicas along the first axis."""
    if len(kept) == 1:
        return list(kept[0])
    return [np.concatenate([borrow(leaf) for leaf in leaves]) for leaves in zip(*kept, strict=True)]
