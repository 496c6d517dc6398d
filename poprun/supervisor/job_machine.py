"""The state machine of a running job: it takes events with their times and returns actions. Pure: no clock, no process.

RUNNING ──▶ SETTLING ──▶ CLOSING ──▶ OVER
│ ▲          │ │         ▲
│ └──────────┘ └──▶ INTERRUPTED     back to RUNNING: the others go on without the failed instances
└────────────────────▶ INTERRUPTED
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

from popdist.records.progress import Role
from poprun.cli.log import Level
from poprun.ipc.facts import Carriers, Ending, EndKind, Facts, JobEnd, Loss, Verdict, signal_name
from poprun.ipc.resizes import ResizeAnswer
from poprun.launch.launch import Across
from poprun.supervisor.diagnosis import (
    InterruptedTraces,
    LastLines,
    LastWords,
    describe_rest,
    first_cause,
    has_failed,
    last_actions,
    lost_spares,
)
from poprun.supervisor.job_events import (
    CLOSE_LIMIT_S,
    EXAMINE_S,
    GRACE_ANSWER_LIMIT_S,
    INTERRUPT_GRACE_S,
    LEAVE_LIMIT_S,
    LEAVE_S,
    LOOK_S,
    LOST_HOST_SETTLE_S,
    MPIRUN_LIMIT_S,
    QUICK_LOOK_S,
    SETTLE_LIMIT_S,
    SETTLE_S,
    SPARE_LIMIT_S,
    TOLD_LIMIT_S,
    Action,
    AgentOrder,
    Answer,
    Command,
    Deed,
    DeedKind,
    Event,
    InstanceChange,
    InstanceChanged,
    InstanceEnded,
    MemberConnected,
    OutputPiece,
    ResizeAsked,
    Say,
    SignalCame,
    Tick,
)
from poprun.supervisor.lookout import Lookout
from poprun.supervisor.members import JobMembers
from poprun.supervisor.resizing import Resizing
from poprun.supervisor.signals import END_SIGNAL, PASSED_ON, SAVE_SIGNALS
from poprun.supervisor.survival import Survival

STANDARD_OUTPUT_CLOSED = 128 + signal.SIGPIPE
_NEVER = float("inf")


class JobPhase(Enum):
    """Phases of a job between its start and its end."""

    RUNNING = 1
    SETTLING = 2
    INTERRUPTED = 3
    CLOSING = 4
    OVER = 5


class JobMachine:
    """One job, from the start of its mpirun to its end.

    The caller passes every event to `advance` as it comes. It passes `Tick` after all events that came together, and at
    `deadline_s`. It carries out the actions in their order before the next event. The last action is `Finish`.

    Args:
        count: The number of instances and spares.
        across: The settings for several hosts, and the limits of waits.
        here: The host of mpirun.
        begin_s: The time at which the job begins.

    Attributes:
        phase: The phase of the job.
        carriers: The instances that drive the replicas, from the beginning and after each change.
    """

    def __init__(self, count: int, across: Across, here: str, begin_s: float) -> None:
        self.phase = JobPhase.RUNNING
        self._members = JobMembers(count, across.spares, across.reserves)
        self._survival = Survival(self._members, across.least)
        self._resizing = Resizing(self._members, across.least if across.spares else 0, across.replicas)
        self._regrowth = None
        if across.most_new:
            from poprun.supervisor.regrowth import Regrowth

            self._regrowth = Regrowth(self._members, self._resizing, self._survival.losses, across)
        self._lookout = Lookout(across.stuck_timeout_s, here, begin_s)
        self._has_others = bool(across.others)
        self._actions: list[Action] = []
        self._around = Tick()
        self._begin_s = begin_s
        self.carriers = [Carriers(0.0, 0, self._members.carriers)]
        self._verdict: Verdict | None = None
        self._exit_status = 0
        self._deadline_s = self._start_deadline_s = begin_s + across.start_timeout_s
        self._next_look_s = begin_s + LOOK_S
        self._settle_limit_s = self._interrupted_at_s = self._rest_limit_s = self._tidy_limit_s = _NEVER
        self._stuck_timeout_s = across.stuck_timeout_s or _NEVER
        self._withheld: list[OutputPiece] = []
        self._last_lines = LastLines()
        self._traces = InterruptedTraces()
        self._is_saving_announced = False
        self._released: int | None = None
        self._passed_on: set[int] = set()
        self._last_resort = iter((END_SIGNAL, signal.SIGKILL))

    @property
    def facts(self) -> Sequence[Facts]:
        """The facts of each instance, by index."""
        return self._members.facts

    @property
    def losses(self) -> Sequence[Loss]:
        """The lost instances and spares without which the others go on."""
        return self._survival.losses

    @property
    def deadline_s(self) -> float:
        """The time of the next `Tick` if no event comes before."""
        return min(self._deadline_s, self._next_look_s)

    def advance(self, event: Event, now_s: float) -> list[Action]:
        """Process an event of time `now_s`, and return the actions to carry out."""
        match event:
            case Tick():
                self._around = event
                self._decide(now_s)
                self._note_carriers(now_s)  # not after each event: a look brings one of each instance
            case OutputPiece(instance, descriptor, data):
                if descriptor == 2:
                    self._last_lines.take(instance, data)
                self._show(event)
            case SignalCame(number):
                self._take_signal(number, now_s)
            case ResizeAsked():
                self._resize(event)
            case _:
                was_spare = self._members.facts[event.instance].record.is_spare
                self._members.take(event, now_s)
                if isinstance(event, MemberConnected):
                    self._greet(event)
                elif was_spare and self._members.facts[event.instance].record.role is Role.ACTIVE:
                    self._actions.append(Say(Level.INFO, f"{self._members.facts[event.instance].name} has joined"))
                elif isinstance(event, InstanceEnded):
                    self._release_traces([event.instance])
                elif isinstance(event, InstanceChanged) and event.change is InstanceChange.NOTICED:
                    self._take_notice(self._members.facts[event.instance].host, now_s)
        actions, self._actions = self._actions, []
        return actions

    def _note_carriers(self, now_s: float) -> None:
        carriers = self._members.carriers
        if carriers != self.carriers[-1].instances:
            step = max(each.record.step for each in self._members.facts)
            self.carriers.append(Carriers(now_s - self._begin_s, step, carriers))

    def _greet(self, event: MemberConnected) -> None:
        if self.phase is JobPhase.CLOSING:
            self._actions.append(AgentOrder(Command.STOP, event.instance))
        if self._members.all_connected:
            self._actions.append(Deed(DeedKind.STOP_LISTENING))

    def _show(self, piece: OutputPiece) -> None:
        if self.phase is JobPhase.SETTLING:
            self._withheld.append(piece)
        elif self.phase is JobPhase.INTERRUPTED and piece.descriptor == 2 and self._exit_status == 128 + signal.SIGINT:
            if data := self._traces.take(piece.instance, piece.data):
                self._actions.append(replace(piece, data=data))
        elif self.phase is not JobPhase.CLOSING or (self._verdict and self._verdict.instance == piece.instance):
            self._actions.append(piece)

    def _show_withheld(self) -> None:
        withheld, self._withheld = self._withheld, []
        for piece in withheld:
            self._show(piece)

    def _decide(self, now_s: float) -> None:
        if self.phase is JobPhase.RUNNING:
            self._watch(now_s)
        elif self.phase is JobPhase.SETTLING:
            self._settle(now_s)
        elif self.phase is JobPhase.INTERRUPTED:
            self._give_up()  # otherwise a failed instance would keep the others from saving
            self._keep_interrupt_deadline(now_s)
            if now_s >= self._deadline_s or (self._members.all_ended and self._members.all_closed):
                self._close(now_s)
        elif self.phase is JobPhase.CLOSING:
            self._see_off(now_s)

    def _resize(self, asked: ResizeAsked) -> None:
        if self.phase in (JobPhase.RUNNING, JobPhase.SETTLING):
            self._actions += self._resizing.ask(asked)
        else:
            self._actions.append(Answer(asked.asker, ResizeAnswer(False, "the job is ending")))

    def _take_notice(self, host: str, now_s: float) -> None:
        """Leave a host that is about to go away; if that is impossible, let all programs save and leave."""
        if self.phase not in (JobPhase.RUNNING, JobPhase.SETTLING) or self._resizing.is_left(host):
            return
        obstacle, actions = self._resizing.leave(host)
        self._actions += actions
        if obstacle:
            self._actions.append(Say(Level.WARN, f"host {host} cannot be left: {obstacle}; all programs get SIGUSR1"))
            self._take_signal(signal.SIGUSR1, now_s)
        else:
            self._actions.append(Say(Level.WARN, f"host {host} is about to go away; other hosts take over from it"))

    def _go_on_resizing(self, now_s: float) -> None:
        if self._regrowth is not None:
            self._actions += self._regrowth.look(now_s)
            self._next_look_s = min(self._next_look_s, self._regrowth.deadline_s)
        was_under_way = self._resizing.is_under_way
        self._actions += self._resizing.look()
        if was_under_way and not self._resizing.is_under_way:
            self._lookout.forget(now_s)  # the others may have waited long for an instance that has just joined

    # While the job runs.

    def _watch(self, now_s: float) -> None:
        members = self._members
        members.note_told_alone(now_s - TOLD_LIMIT_S)
        if (fault := self._around.closed) is not None:
            self._exit_status = STANDARD_OUTPUT_CLOSED
            if fault:
                text = f"standard output cannot be written: {fault}; the job ends because nobody could see its output"
                self._actions.append(Say(Level.ERROR, text))
            self._close(now_s)
        elif members.all_succeeded:
            self._await_the_rest(now_s)
        elif lost_spares(members.facts) and not has_failed(members.facts) and self._give_up_the_failed(now_s):
            return
        elif has_failed(members.facts) or members.all_ended or self._cannot_go_on(now_s):
            if not self._give_up_the_failed(now_s):
                self._begin_to_settle(now_s)
        else:
            self._go_on_resizing(now_s)
            if self._resizing.is_under_way or any(each.is_gone for each in members.facts):
                self._next_look_s = min(self._next_look_s, now_s + QUICK_LOOK_S)
            if now_s >= self._next_look_s:
                self._look(now_s)

    def _await_the_rest(self, now_s: float) -> None:
        """Wait until all processes of all instances are gone; wait only briefly for instances that were given up.

        An instance that was given up may not obey its agent any more.
        """
        if self._around.is_behind or self._tidy_limit_s == _NEVER:
            self._tidy_limit_s = now_s + self._stuck_timeout_s
        members = self._members
        if (members.all_closed and members.are_spares_closed) or now_s >= self._rest_limit_s:
            self._close(now_s)
            return
        if now_s >= self._tidy_limit_s:
            self._actions += [
                Say(Level.WARN, line) for line in describe_rest(self._members.left, self._stuck_timeout_s)
            ]
            self._close(now_s)
            return
        if members.are_others_closed:
            limit_s = CLOSE_LIMIT_S if members.are_spares_closed else SPARE_LIMIT_S
            self._rest_limit_s = min(self._rest_limit_s, now_s + limit_s)
        self._deadline_s, self._next_look_s = min(self._rest_limit_s, self._tidy_limit_s), _NEVER

    def _cannot_go_on(self, now_s: float) -> bool:
        is_late = now_s >= self._deadline_s and not self._members.all_connected
        return self._around.mpirun_status is not None or is_late

    def _look(self, now_s: float) -> None:
        """Evaluate the answers to the last question, and ask every instance again for its progress."""
        self._lookout.look(self._members.facts, now_s, self._around.is_behind, self._around.is_mpirun_stopped)
        if self._lookout.in_vain or self._lookout.silent:
            if not self._give_up_the_failed(now_s):
                self._begin_to_settle(now_s)
        elif self._lookout.stuck is not None:
            self._examine(now_s, self._lookout.stuck)
        elif self._lookout.halt is not None:
            self._conclude(now_s)
        else:
            self._actions += [*self._survival.tell_at_end(), *self._members.ask()]
            self._next_look_s = now_s + LOOK_S
            if self._members.all_connected:
                self._deadline_s = _NEVER

    def _give_up_the_failed(self, now_s: float) -> bool:
        """Let the others go on without failed, stuck or prematurely ended instances; return False if they cannot."""
        if not self._give_up():
            return False
        self.phase = JobPhase.RUNNING
        self._released = None
        self._lookout.forget(now_s)
        self._deadline_s = _NEVER if self._members.all_connected else self._start_deadline_s
        self._next_look_s = now_s + LOOK_S
        return True

    def _give_up(self) -> bool:
        if self._around.mpirun_status is not None:
            return False
        actions = self._survival.give_up(self._lookout.useless, self._was_told, self._describe_failure)
        self._actions += actions
        return bool(actions)

    def _was_told(self, ending: Ending) -> bool:
        """Return whether an instance ended by a signal that poprun has passed on, or by itself after an interrupt."""
        is_own_end = ending.kind is EndKind.EXIT and ending.at_s >= self._interrupted_at_s
        return is_own_end or ending.exit_status - 128 in {*self._passed_on, self._exit_status - 128}

    def _describe_failure(self, failed: Facts) -> str:
        return self._lookout.describe(failed, self._members.facts)

    # After a failure.

    def _begin_to_settle(self, now_s: float) -> None:
        self.phase = JobPhase.SETTLING
        self._actions += self._members.ask()
        is_left_alone = self._around.mpirun_status is not None and self._has_others
        self._deadline_s = now_s + (LOST_HOST_SETTLE_S if is_left_alone else SETTLE_S)
        self._settle_limit_s = now_s + SETTLE_LIMIT_S
        self._next_look_s = _NEVER

    def _examine(self, now_s: float, stuck: int) -> None:
        """Ask a stuck instance for its stack."""
        self.phase = JobPhase.SETTLING
        self._actions.append(AgentOrder(Command.EXAMINE, stuck))
        self._deadline_s = now_s + EXAMINE_S
        self._next_look_s = _NEVER

    def _settle(self, now_s: float) -> None:
        facts = self._members.facts
        stuck = self._lookout.stuck
        if stuck is not None:
            if facts[stuck].state or now_s >= self._deadline_s:
                self._conclude(now_s)
            return
        cause = first_cause(facts, self._lookout.in_vain)
        if self._released is not None:
            self._see_out(now_s, facts[self._released])
        elif now_s < self._deadline_s:
            return
        elif now_s < self._settle_limit_s and (self._members.are_asked or self._lacks_mpirun(facts)):
            self._deadline_s = min(now_s + SETTLE_S, self._settle_limit_s)
        elif cause is not None and facts[cause].ending is None:
            self._released = cause
            self._actions += self._members.release(cause, len(facts))
            self._deadline_s, self._next_look_s = now_s + LEAVE_S, now_s + QUICK_LOOK_S
        else:
            self._conclude(now_s)

    def _lacks_mpirun(self, facts: Sequence[Facts]) -> bool:
        """Return whether mpirun has ended, as its agents say, but poprun does not know its status yet."""
        return self._around.mpirun_status is None and self._lookout.are_orphaned(facts)

    def _see_out(self, now_s: float, released: Facts) -> None:
        """Wait for the exit status of a released instance. If the instance has noticed the release, wait longer."""
        if released.ending is not None or now_s >= self._deadline_s:
            self._conclude(now_s)
        elif now_s >= self._next_look_s:
            if released.record.heeded < len(self._members.facts):
                self._actions += self._members.ask()
                self._next_look_s = now_s + QUICK_LOOK_S
            else:
                self._deadline_s, self._next_look_s = self._deadline_s + LEAVE_LIMIT_S, _NEVER

    def _conclude(self, now_s: float) -> None:
        if not self._give_up_the_failed(now_s):
            self._verdict = self._lookout.judge(self._members.facts, self._around.mpirun_status)
            self._exit_status = self._verdict.exit_status
            self._close(now_s)
        self._show_withheld()

    # After a signal.

    def _take_signal(self, number: int, now_s: float) -> None:
        if number in PASSED_ON:
            self._passed_on.add(number)
            self._actions += self._members.pass_on(number)
        elif self.phase in (JobPhase.RUNNING, JobPhase.SETTLING):
            self._interrupt(number, now_s)
        elif self.phase is JobPhase.INTERRUPTED:
            self._close(now_s)

    def _interrupt(self, number: int, now_s: float) -> None:
        self.phase = JobPhase.INTERRUPTED
        self._exit_status = 128 + number
        line = f"poprun received {signal_name(number)} and ended all instances"
        self._verdict = Verdict(None, 128 + number, (line,))
        self._show_withheld()
        self._actions += self._members.pass_on(number)
        self._actions += self._members.ask()  # the answer says how long they need to save
        self._interrupted_at_s = now_s
        self._deadline_s = now_s + INTERRUPT_GRACE_S
        self._next_look_s = _NEVER

    def _keep_interrupt_deadline(self, now_s: float) -> None:
        """Extend the deadline after SIGTERM or SIGINT to the time that programs need to save.

        After one instance has ended, the others get the usual time only.
        """
        facts = self._members.facts
        ends = [each.ending for each in facts if each.ending is not None and each.is_needed]
        if any(ending.at_s >= self._interrupted_at_s for ending in ends):
            self._deadline_s = min(self._deadline_s, now_s + INTERRUPT_GRACE_S)
        elif self._exit_status - 128 in SAVE_SIGNALS:
            grace_s = max([INTERRUPT_GRACE_S, *(each.record.grace_s for each in facts)])
            if grace_s > INTERRUPT_GRACE_S:
                self._announce_saving(grace_s)
            if self._members.are_asked:  # with too few cores, a request for more time may come late
                grace_s = max(grace_s, GRACE_ANSWER_LIMIT_S)
            self._deadline_s = self._interrupted_at_s + grace_s

    def _announce_saving(self, grace_s: float) -> None:
        if self._exit_status == 128 + signal.SIGINT and not self._is_saving_announced:
            self._is_saving_announced = True
            text = f"the programs save and leave, within {grace_s:g} s; press Ctrl-C again to end them at once"
            self._actions.append(Say(Level.WARN, text))

    def _release_traces(self, instances: Iterable[int]) -> None:
        released = ((instance, self._traces.release(instance)) for instance in instances)
        self._actions += [OutputPiece(instance, 2, data) for instance, data in released if data]

    # The end.

    def _close(self, now_s: float) -> None:
        self._release_traces(range(len(self._members.facts)))
        self.phase = JobPhase.CLOSING
        self._actions += self._members.stop()
        self._deadline_s = now_s + CLOSE_LIMIT_S
        self._next_look_s = _NEVER

    def _see_off(self, now_s: float) -> None:
        if self._around.mpirun_status is not None and not self._members.any_connected:
            self._end()
        elif now_s >= self._deadline_s:
            number = next(self._last_resort, None)
            if number is None:
                self._end()
            else:
                self._actions.append(Deed(DeedKind.SEND_TO_MPIRUN, number))
                self._deadline_s = now_s + MPIRUN_LIMIT_S

    def _end(self) -> None:
        self.phase = JobPhase.OVER
        self._deadline_s = _NEVER
        was_interrupted = self._interrupted_at_s != _NEVER
        was_told = was_interrupted or self._exit_status - 128 in {signal.SIGPIPE, *self._passed_on}
        words = LastWords(
            JobEnd(self._exit_status, was_told, self._verdict),
            self._survival.obstacle,
            tuple(self._survival.losses),
            self._around.mpirun_status,
            frozenset(each.host for each in self._members.facts if each.ending is not None and each.ending.fault),
            self._last_lines.describe_cause(self._verdict, self._members.facts) if self._verdict else "",
            not self._members.all_connected,
        )
        self._actions += last_actions(words, self._has_others)
