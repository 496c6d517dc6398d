"""The order of a training step, and the work around it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias

import numpy as np

from collectives import Communicator, PeerLostError
from collectives.instruments import EXCHANGE, FORWARD_BACKWARD, UPDATE, Instruments
from popdist.records.recording import OBSTACLE_TO_JOINS, note_obstacle
from strategies.core.agreement import Members, broadcast_text, majority_of
from strategies.core.engine import Engine, Pending, State
from strategies.core.journal import JoinsNowError, Recorded
from strategies.core.metrics import (
    LayerStatistics,
    Metrics,
    StepExtras,
    StepNotice,
    UnreadArray,
    layer_statistics,
    metrics_of,
    report_step,
)
from strategies.core.survival import LOSSES, StateTransfer, collectively, meet, repeated, warn_of_loss
from strategies.errors import NonFiniteGradientError, SpareError, UnappliedStepError, WeightError, ZeroWeightError
from strategies.loss_scaling import LossScaling
from strategies.typing import Batch, Gradients, Tree

if TYPE_CHECKING:
    from strategies.values import TrainState


_Done: TypeAlias = tuple[State, Metrics] | UnappliedStepError
_UNAPPLIED: Mapping[str, type[UnappliedStepError]] = {
    kind.__name__: kind for kind in (NonFiniteGradientError, WeightError, ZeroWeightError)
}
_SHARED_STEP = "the metrics of the last step"


class StepWatcher(Protocol):
    """The interface of objects that record steps.

    The loop calls `reduced` and then `updated` for each step, on all instances. If a loss interrupts a step, its
    repetition is reported again. The step raises an error of either method.
    """

    def reduced(self, snapshot: TrainState, batch: Batch, gradients: Gradients, shards: Tree) -> None:
        """Record the mean gradients of a step, before the variables are updated.

        Args:
            snapshot: The `TrainState` before the step.
            batch: The batch of the local replicas.
            gradients: The mean gradients, like the trained variables; `shards` may cut some.
            shards: The cuts of the mean gradients, which make this a collective call; None if they are whole.
        """

    def updated(self, snapshot: TrainState, metrics: Metrics) -> None:
        """Record that a step is complete.

        Raises:
            SystemExit: With status 0, after the last step to record.
        """


@dataclass(frozen=True)
class StepRules(Generic[State]):
    """The rules of steps, independent of the engine.

    Attributes:
        digest_every: Number of steps between comparisons of the state's bits between instances; 0 for none.
        checks_numerics: Whether a mean loss that is not finite is an error.
        unrecoverable_part: Name of the part of the state that is lost with an instance, for messages; None without one.
        flipped: Returns the state with one bit changed, to inject a fault.
        rows_of: Returns the number of rows of all local replicas in a batch.
    """

    digest_every: int
    checks_numerics: bool
    unrecoverable_part: str | None
    flipped: Callable[[State], State]
    rows_of: Callable[[Batch], int]


@dataclass(frozen=True)
class _Unapplied:
    """The error of a step that was not applied, for other instances.

    Attributes:
        kind: The name of the error's class.
        text: The message.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, error: UnappliedStepError) -> _Unapplied:
        """Return the description of an error."""
        return cls(type(error).__name__, str(error))

    @property
    def error(self) -> UnappliedStepError:
        """The error."""
        return _UNAPPLIED.get(self.kind, UnappliedStepError)(self.text)


@dataclass(frozen=True)
class _Surroundings:
    """The facts around a step that stay while the instances stay: they are looked up once, and not in each step.

    Attributes:
        communicator: The connection of the instances; another one means other instances.
        instruments: The instruments attached to this instance.
        local: The number of local replicas.
    """

    communicator: Communicator
    instruments: Instruments
    local: int

    @classmethod
    def of(cls, members: Members) -> _Surroundings:
        """Return the facts about the present instances.

        Raises:
            SpareError: This instance is a spare, and would make a step that belongs to the active instances.
        """
        if members.is_spare and not members.journal.is_joining:
            raise SpareError("this spare would make a step of the training, which only active instances make")
        return cls(members.communicator, members.instruments, len(members.local_replicas))


class StepLoop(Generic[State, Pending]):
    """The order of a training step, and the work around it.

    Args:
        members: The instances.
        engine: The engine that computes the steps.
        rules: The rules of the steps.
        scaling: The rule of loss scaling; None without scaling.
        watcher: Watcher that gets every step; None if nothing is recorded.

    Attributes:
        notice: The notice that travels with the gradients of every step.
        metrics: The metrics of the last step; None before the first step.
        scaling: The rule of loss scaling.
        transfer: The transfer of the latest state to instances that join.
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
        self._last_surroundings: _Surroundings | None = None
        self._latest: State | None = None  # kept if the job can go on after a loss
        if rules.unrecoverable_part and engine.has_copies():
            members.done_so_far.at_change.append(self._fit_latest)
        self.transfer = StateTransfer(members, engine, rules.unrecoverable_part)
        self._rehearsal: State | None = None  # a spare's first state with values, for its rehearsal
        self._recorded = Recorded("step", self._packed, self._replayed) if members.journal.is_kept else None
        self._before: State | None = None  # the state with which the last step has begun
        self._seen: LayerStatistics | None = None  # of the last step in which they were due

    # ---- one step

    def _one_step(self, instruments: Instruments, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Make one update: gradients of the local replicas, their means over all replicas, new variables."""
        watcher = self._watcher
        with instruments.during[FORWARD_BACKWARD]:
            pending = self._engine.begin(state, batch, self.notice.is_given)
        for bucket, contributions in instruments.each(FORWARD_BACKWARD, pending.buckets):
            with instruments.during[EXCHANGE]:
                pending.exchange.reduce(bucket, contributions)
        result = self._engine.finish_exchange(pending)
        self.notice.agree(result.notice)
        if self._rules.checks_numerics and result.is_weighted and result.names:
            loss = float(np.asarray(result.tail)[0])
            if not math.isfinite(loss):  # its gradients may be finite: those of a constant that is NaN are 0
                raise NonFiniteGradientError(
                    f"the mean loss over all replicas is {loss} at step {state.step}, but its gradients are finite; "
                    "the step was not applied: look for rows or operations that make the loss NaN or infinite"
                )
        scale = state.loss_scale
        if self.scaling is not None and scale is not None:
            scale = result.scale_after(self.scaling, scale, result.is_finite) if result.is_weighted else scale.kept()
        settings = self._members.distributions
        self._seen = None
        if settings is not None:
            layers = partial(self._engine.layers, state, pending, result)
            self._seen = layer_statistics(settings, state.step, layers, self._members)
        if watcher is not None:
            watcher.reduced(self._engine.snapshot(state), batch, *result.gradients())
        metrics = self.metrics = metrics_of(result.names, result.tail, scale)
        with instruments.during[UPDATE]:
            state = self._engine.update(pending, scale)
        if watcher is not None:
            watcher.updated(self._engine.snapshot(state), metrics)
        return state, metrics

    # ---- around it

    def make_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Make one update. If instances are lost meanwhile and the others have the whole state, the others make it.

        If poprun wants other active instances, they change first: this is the boundary between two steps.

        An error before the update leaves the state unchanged, so that the step can be repeated.

        Args:
            state: The state, which is used up.
            batch: The batch of the local replicas.

        Returns:
            The new state, and the metrics as means over all replicas.
        """
        if self._recorded is None:
            return self._made(state, batch)
        journal = self._members.journal
        if journal.replays:
            instruments = self._members.instruments  # a forked child is refused before it rehearses
            self._rehearse(batch)
            instruments.step_begins(state.step)
        self._before = state
        done = journal.perform(self._recorded, partial(self._carried, state, batch))
        self._before = None
        if isinstance(done, UnappliedStepError):
            raise done
        return done

    def _made(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        self._keep(state)
        members, surroundings = self._members, self._surroundings()
        local, can_carry_on = surroundings.local, members.can_carry_on
        batch = members.up_to_date(batch)
        surroundings.instruments.step_begins(state.step)
        if members.faults.is_armed and not members.journal.is_joining and members.faults.take_flip():
            state = self._rules.flipped(state)
        try:
            state, metrics = self._survived(surroundings, state, batch, can_carry_on)
        except UnappliedStepError as error:  # on all instances: it completes the operation as new variables do
            members.done_so_far.complete(partial(self._share_refusal, _Unapplied.of(error)) if can_carry_on else None)
            raise
        instruments = self._surroundings().instruments
        rows = partial(self._rules.rows_of, batch)
        report_step(members, instruments, rows, local, metrics, state.step, partial(self._extras, state))
        self._keep(state)
        can_share = can_carry_on and self._outlives_instances(state)
        members.done_so_far.complete(partial(self._share, state) if can_share else None)
        return state, metrics

    def _survived(
        self, surroundings: _Surroundings, state: State, batch: Batch, can_carry_on: bool
    ) -> tuple[State, Metrics]:
        """Make a step; if the members change before or meanwhile, repeat it with the new ones."""
        members = self._members
        try:
            if members.journal.is_joining:
                raise JoinsNowError
            if can_carry_on and (members.progress.is_released or members.progress.is_resize_due):
                raise PeerLostError("poprun wants other active instances, or a process is lost for which none waits")
            return self._checked(surroundings, state, batch)
        except LOSSES as loss:
            if not self._outlives_instances(state):
                raise
            return self._repeated(loss, state, batch)

    def _outlives_instances(self, state: State) -> bool:
        """Return whether the other instances have the whole state if one is lost."""
        return not self._rules.unrecoverable_part or self._engine.has_copies(state)

    # ---- with spares

    def _carried(self, state: State, batch: Batch) -> _Done[State]:
        """Make one update whose state can be handed over; return the error of a step that is not applied."""
        transfer, journal = self.transfer, self._members.journal
        transfer.note(state)
        transfer.batch = batch
        try:
            state, metrics = self._made(state if journal.is_joining else transfer.read(state), batch)
        except UnappliedStepError as error:
            return error
        finally:
            transfer.batch = None
        transfer.note(state)
        return state, metrics

    def _packed(self, done: _Done[State]) -> Callable[[], object]:
        if isinstance(done, UnappliedStepError):
            return partial(asdict, _Unapplied.of(done))
        state, metrics = done
        names, means = metrics.names, metrics.means
        if isinstance(means, np.ndarray):
            means = means[: len(names)].copy()  # without the values behind them
        step, is_agreed = state.step, self.notice.is_agreed
        return lambda: (step, names, np.array(means)[: len(names)], is_agreed)

    def _replayed(self, received: dict[str, str] | tuple[int, tuple[str, ...], np.ndarray, bool]) -> _Done[State]:
        """Return the result of a step of the others."""
        assert self._before is not None
        if isinstance(received, dict):
            refusal = _Unapplied(**received)
            self.transfer.note(self._before)
            self._members.done_so_far.share = partial(self._share_refusal, refusal)
            return refusal.error
        step, names, means, is_agreed = received
        metrics = self.metrics = Metrics(names, means)
        self.notice.agree(float(is_agreed))
        self.transfer.note(self._before)
        state = self.transfer.placeholder_state(self._before, step)
        self._members.done_so_far.share = partial(self._share, state)
        return state, metrics

    def _rehearse(self, batch: Batch) -> None:
        """Make the first step on a spare alone, and throw its result away."""
        state, self._rehearsal = self._rehearsal, None
        if state is None:
            return
        programs = self._members.running_programs
        programs.begin()
        with self._members.journal.inside(), programs.ending(), suppress(UnappliedStepError):
            self._engine.rehearse(state, self._members.real_batch(batch))

    def _extras(self, state: State, steps: int = 1) -> StepExtras:
        """Return the extra values of steps for sinks: learning rates, and statistics of layers."""
        rates, seen = self._engine.learning_rates(state, steps), self._seen
        reads = [] if rates is None else [rates]
        if seen is None or seen.step != state.step:  # nothing was due
            return StepExtras(reads)
        return StepExtras([*reads, seen.read], seen.distributions)

    def _surroundings(self) -> _Surroundings:
        found = self._last_surroundings
        if found is None or found.communicator is not self._members.communicator:
            found = self._last_surroundings = _Surroundings.of(self._members)
        return found

    def _checked(self, surroundings: _Surroundings, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Make a step, after a comparison of the state's bits if one is due; end the programs of the replicas."""
        programs, every = self._members.running_programs, self._rules.digest_every
        programs.begin()
        with programs.ending():
            if self._rules.unrecoverable_part:
                state = self._engine.fitted(state)
            if every and state.step and not state.step % every:
                root = majority_of(self._members, self._engine.digest(state), state.step)
                state = state if root is None else self._engine.share(state, root)
            return self._one_step(surroundings.instruments, state, batch)

    # ---- together with the others

    def start(
        self,
        begun: Callable[[], State],
        local: Callable[[], State],
        share: Callable[[State, int], State] | None = None,
    ) -> State:
        """Return the first state, the same on all instances. Collective.

        Args:
            begun: Function that returns the first state. Collective.
            local: Function that returns a state with arrays of the same shapes, for an instance that is late.
            share: Function that returns the first state of a rank on all instances, as in `collectively`. Collective.
                None if instances have no parts of their own in it.
        """

        def replayed(step: int) -> State:
            state = self._rehearsal = local()
            return self.transfer.placeholder_state(state, step)

        recorded = Recorded[State]("start of a training", lambda state: partial(int, state.step), replayed)
        self.transfer.first = local
        if self._rules.unrecoverable_part and self._engine.can_keep_copies:
            note_obstacle(self.transfer.obstacle, OBSTACLE_TO_JOINS)
        elif self._rules.unrecoverable_part:
            warn_of_loss(self._members, self.transfer.obstacle)
        if self._rules.unrecoverable_part and not self._engine.has_copies():
            state = self._members.journal.perform(recorded, begun, survives=False)
        else:
            state = collectively(self._members, begun, share or self._share, local, recorded)
        self.transfer.note(state)
        self.transfer.first = None
        self._keep(state)
        return state

    def _keep(self, state: State) -> None:
        """Keep a sharded state, so that it can be sharded again when the instances change."""
        self._latest = state if self._rules.unrecoverable_part and self._engine.has_copies(state) else None

    def _repeated(self, loss: BaseException, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Repeat a step after a loss, on the batch of the replicas that this instance drives since then.

        If others have completed the step and this instance has not, take over their result.
        """
        refusal: UnappliedStepError | None = None

        def catch_up() -> tuple[State, Metrics] | None:
            nonlocal state, batch, refusal
            meeting = meet(self._members)
            state = self.transfer.read(state)
            if not meeting.is_late and not meeting.is_past:
                batch = self._members.replicas_batch(batch)
                return None
            try:
                self._latest = self._share(state, meeting.newest) if meeting.is_late else self._engine.completed()
            except UnappliedStepError as error:  # raised below: before, parts are cut anew on all instances
                refusal, self._latest = error, state
                return state, Metrics((), np.zeros(0, np.float32))
            assert self.metrics is not None
            return self._latest, self.metrics

        done = repeated(self._members, loss, lambda: self._checked(self._surroundings(), state, batch), catch_up)
        if refusal is not None:
            raise refusal
        return done

    def _fit_latest(self) -> None:
        """Cut parts of the latest state anew after a change of the instances. Collective."""
        if self._latest is not None:
            self._latest = self._engine.fitted(self._latest)

    def _share(self, state: State, root: int) -> State:
        """Return the state of rank `root`, and take over its metrics, notice and look at layers. Collective.

        Raises:
            UnappliedStepError: The step of that rank has raised it.
        """
        own, state = self.metrics, self.transfer.read(state)
        seen = None if self._seen is None else self._seen.as_json
        numbers = None if own is None else np.asarray(own.means).tolist()
        text = json.dumps(None if own is None else [own.names, numbers, self.notice.is_agreed, seen])
        received = json.loads(broadcast_text(self._members.communicator, text, root, _SHARED_STEP))
        if isinstance(received, dict):
            raise _Unapplied(**received).error
        state = self._engine.share(state, root)  # last, so that a failure changes nothing
        if received is not None:
            self.metrics = Metrics(tuple(received[0]), np.array(received[1], np.float32))
            self.notice.agree(float(received[2]))
            self._seen = None if received[3] is None else LayerStatistics.from_json(received[3])
        return state

    def _share_refusal(self, received: _Unapplied, root: int) -> None:
        """Tell instances that lack the result of a step why it was not applied. Collective."""
        broadcast_text(self._members.communicator, json.dumps(asdict(received)), root, _SHARED_STEP)

    def take_over(self, state: State, batches: Sequence[Batch], metrics: Metrics, tails: UnreadArray) -> None:
        """Note that the only replica has made several steps in one program.

        Args:
            state: The state after these steps.
            batches: The batch of each step, of the same shapes.
            metrics: The metrics of the last step.
            tails: The metrics of each step.
        """
        self.metrics, self._seen = metrics, None
        self.notice.agree(self.notice.is_given)
        rows, extras = partial(self._rules.rows_of, batches[0]), partial(self._extras, state, len(batches))
        report_step(self._members, self._members.instruments, rows, 1, metrics, state.step, extras, tails)
