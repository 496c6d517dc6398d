"""The order of a training step, and what is done around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol

import numpy as np

from collectives.instruments import EXCHANGE, FORWARD_BACKWARD, UPDATE
from strategies.core.agreement import broadcast_text
from strategies.core.digest import majority_of
from strategies.core.engine import Engine, Pending, State
from strategies.core.members import Members
from strategies.core.metrics import Metrics, StepNotice, UnreadArray, metrics_of, tell_end
from strategies.core.survival import LOSSES, meet, repeated, together, warn_of_loss
from strategies.loss_scaling import LossScaling
from strategies.typing import Batch, Gradients, Tree

if TYPE_CHECKING:
    from strategies.train_state import TrainState


class StepWatcher(Protocol):
    """The interface of objects to which a step is reported while it is made."""

    def reduced(self, snapshot: TrainState, batch: Batch, gradients: Gradients, shards: Tree) -> None:
        """Record the mean gradients of a step, before the variables are updated.

        Args:
            snapshot: the `TrainState` before the step.
            batch: the batch of the local replicas.
            gradients: the mean gradients, like the trained variables; some may be cut by `shards`.
            shards: how mean gradients are cut; None if they are whole. If they are cut, this is a collective call.
        """

    def updated(self, snapshot: TrainState, metrics: Metrics) -> None:
        """Record that a step is complete.

        Raises:
            SystemExit: with status 0, after the last step that is to be recorded.
        """


@dataclass(frozen=True)
class StepRules(Generic[State]):
    """The rules by which steps are made, whatever the engine is.

    Attributes:
        digest_every: compare the bits of the state between instances before every so many steps; 0: never.
        own_part: the part of the state that no other instance has, in words; None if there is none.
        flipped: returns the state with one bit changed, for faults on purpose.
        rows_of: returns the rows of all local replicas in a batch.
    """

    digest_every: int
    own_part: str | None
    flipped: Callable[[State], State]
    rows_of: Callable[[Batch], int]


class StepLoop(Generic[State, Pending]):
    """The maker of training steps: the order of a step, and what is done around it.

    Args:
        members: the instances.
        engine: computes the steps.
        rules: the rules of the steps.
        scaling: the scaling of losses; None if they are not scaled.
        watcher: told of every step; None if nothing is recorded.

    Attributes:
        notice: the notice that travels with the gradients of every step.
        metrics: the metrics of the last step; None before the first one.
        scaling: see above.
    """

    def __init__(
        self,
        members: Members,
        engine: Engine[State, Pending],
        rules: StepRules[State],
        scaling: LossScaling | None,
        watcher: StepWatcher | None,
    ) -> None:
        self.notice = StepNotice()
        self.metrics: Metrics | None = None
        self.scaling = scaling
        self._members = members
        self._engine = engine
        self._rules = rules
        self._watcher = watcher

    # ---- one step

    def _one_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Make one update: gradients of the local replicas, their means over all replicas, new variables."""
        instruments, watcher = self._members.instruments, self._watcher
        with instruments.during[FORWARD_BACKWARD]:
            pending = self._engine.begin(state, batch, self.notice.is_given)
        for bucket, contributions in instruments.each(FORWARD_BACKWARD, pending.buckets):
            with instruments.during[EXCHANGE]:
                pending.exchange.reduce(bucket, contributions)
        arrived = self._engine.arrived(pending)
        self.notice.agree(arrived.notice)
        scale = state.loss_scale
        if self.scaling is not None and scale is not None:
            scale = arrived.scale_after(self.scaling, scale, arrived.is_finite)
        if watcher is not None:
            watcher.reduced(self._engine.snapshot(state), batch, *arrived.gradients())
        with instruments.during[UPDATE]:
            state = self._engine.update(pending, scale)
        metrics = self.metrics = metrics_of(arrived.names, arrived.tail, scale)
        if watcher is not None:
            watcher.updated(self._engine.snapshot(state), metrics)
        return state, metrics

    # ---- around it

    def make_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Make one update. If instances are lost meanwhile and the others have all of the state, these make it.

        Args:
            state: the state, which is used up.
            batch: the batch of the local replicas.

        Returns:
            The new state, and the metrics as means over all replicas.
        """
        members, local = self._members, len(self._members.local_replicas)
        batch = members.up_to_date(batch)
        members.instruments.step_begins(state.step)
        if members.faults.take_flip():
            state = self._rules.flipped(state)
        try:
            state, metrics = self._checked(state, batch)
        except LOSSES as loss:
            if self._rules.own_part:
                raise
            state, metrics = self._repeated(loss, state, batch)
        tell_end(members, partial(self._rules.rows_of, batch), local, metrics, state.step)
        can_share = members.can_carry_on and not self._rules.own_part
        members.done_so_far.complete(partial(self._share, state) if can_share else None)
        return state, metrics

    def _checked(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Make a step, after a comparison of the state's bits where it is time; end its programs."""
        programs = self._members.reducer
        programs.begin()
        with programs.ending():
            return self._one_step(self._compared(state), batch)

    def _compared(self, state: State) -> State:
        """Return the state; if this instance has other bits than most, return theirs."""
        every = self._rules.digest_every
        if not every or not state.step or state.step % every:
            return state
        root = majority_of(self._members, self._engine.digest(state), state.step)
        return state if root is None else self._engine.share(state, root)

    # ---- together with the others

    def start(self, begun: Callable[[], State], local: Callable[[], State]) -> State:
        """Return the first state, the same on all instances. Collective.

        Args:
            begun: returns the first state. Collective.
            local: returns a state with arrays of the same shapes, for an instance that is late.
        """
        if part := self._rules.own_part:
            warn_of_loss(self._members, f"every instance has a part of the state that no other has ({part})")
            return begun()
        return together(self._members, begun, self._share, local)

    def _repeated(self, loss: BaseException, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Repeat a step after a loss, on the batch of the replicas that this instance drives since then.

        If others have completed the step and this instance has not, take over their result.
        """

        def catch_up() -> tuple[State, Metrics] | None:
            nonlocal batch
            meeting = meet(self._members)
            if not meeting.is_late:
                batch = self._members.replicas_batch(batch)
                return None
            newest = self._share(state, meeting.newest)
            assert self.metrics is not None
            return newest, self.metrics

        return repeated(self._members, loss, lambda: self._checked(state, batch), catch_up)

    def _share(self, state: State, root: int) -> State:
        """Return the state of rank `root`, and take over its metrics and notice. Collective."""
        own = self.metrics
        text = json.dumps(None if own is None else [own.names, np.asarray(own.means).tolist(), self.notice.is_agreed])
        told = json.loads(broadcast_text(self._members.communicator, text, root, "the metrics of the last step"))
        state = self._engine.share(state, root)  # comes last: where it fails, nothing has changed
        if told is not None:
            self.metrics = Metrics(tuple(told[0]), np.array(told[1], np.float32))
            self.notice.agree(float(told[2]))
        return state

    def take_over(self, state: State, batches: Sequence[Batch], metrics: Metrics, tails: UnreadArray) -> None:
        """Note that the only replica has made several steps in one program.

        Args:
            state: the state after these steps.
            batches: the batch of each step, of equal shapes.
            metrics: the metrics of the last step.
            tails: the metrics of each step.
        """
        self.metrics = metrics
        self.notice.agree(self.notice.is_given)
        tell_end(self._members, partial(self._rules.rows_of, batches[0]), 1, metrics, state.step, tails)
