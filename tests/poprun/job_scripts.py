"""A simulated job on a fake clock: agents and mpirun that follow a script."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from popdist.records.progress import ProgressRecord, Role, State
from popdist.records.wanted import Wanted
from poprun.cli.log import Level
from poprun.ipc.facts import Ending, EndKind, JobEnd, Verdict
from poprun.ipc.resizes import ResizeRequest
from poprun.launch.launch import Across
from poprun.supervisor.job_events import (
    Action,
    AgentOrder,
    Command,
    Deed,
    DeedKind,
    Event,
    Finish,
    InstanceChange,
    InstanceChanged,
    InstanceEnded,
    MemberConnected,
    ProgressCame,
    ResizeAsked,
    Say,
    SignalCame,
    Tick,
)
from poprun.supervisor.job_machine import JobMachine, JobPhase

BEGIN_S = 1000.0
ANSWER_S = 0.01
"""The time that agents and mpirun take to obey an order, unless the script sets another one."""

ASK, EXAMINE, RELEASE, WANT_ACTIVE, BEGIN, CALL, PASS_ON, STOP = Command
TOLD, ORPHANED, EXAMINED, CLOSED, NOTICED, LOST = InstanceChange
STOP_LISTENING, SEND_TO_MPIRUN, SHOW_HIDDEN_ERRORS, SHOW_COMPLAINT = DeedKind


def kind_of(action: Action) -> type[Action] | Command | DeedKind:
    """Return the command of an order, the kind of a deed, or the class of any other action."""
    match action:
        case AgentOrder(command):
            return command
        case Deed(kind):
            return kind
    return type(action)


def exited(status: int = 0, at_s: float = 0.0) -> Ending:
    return Ending(EndKind.EXIT, status, at_s)


def killed(number: int = 9, at_s: float = 0.0, **more: Any) -> Ending:
    return Ending(EndKind.SIGNAL, number, at_s, **more)


def running(number: int = 4, since_s: float = 0.0, **more: Any) -> ProgressRecord:
    """Return the record of an instance between collectives."""
    return ProgressRecord(3, number, "barrier", State.RUNNING, BEGIN_S + since_s, **more)


def inside(*waiting_for: int, number: int = 5, since_s: float = 0.0) -> ProgressRecord:
    """Return the record of an instance in a collective."""
    return ProgressRecord(3, number, "all_reduce", State.IN_COLLECTIVE, BEGIN_S + since_s, waiting_for)


def joining(since_s: float = 0.0) -> ProgressRecord:
    """Return the record of an instance that waits for the others in `popdist.init`."""
    return ProgressRecord(state=State.JOINING, since_s=BEGIN_S + since_s)


def leaving(number: int = 4, since_s: float = 0.0, **more: Any) -> ProgressRecord:
    """Return the record of an instance in its exit handlers."""
    return ProgressRecord(3, number, "barrier", State.LEAVING, BEGIN_S + since_s, **more)


@dataclass
class Instance:
    """The behaviour of an instance and its agent when poprun sends them orders.

    Attributes:
        host: The name of its host.
        record: The progress record that it answers with.
        answers: Whether it answers.
        is_stopped: Whether a signal has stopped it.
        works: Whether it uses CPU time before it reaches `popdist.init`.
        stops: Whether it obeys `Stop`.
        after_signal: Seconds until it ends after a forwarded signal, and how it ends; None if it does not end.
        state: The process state that an examination shows; "" for none.
        stack: The stack that an examination shows.
        after_release: Seconds until it ends after `Release`, and how it ends; None if it does not end.
        heeds: Whether it notes its release.
    """

    host: str = "node0"
    record: ProgressRecord = field(default_factory=ProgressRecord)
    answers: bool = True
    is_stopped: bool = False
    works: bool = True
    stops: bool = True
    after_signal: tuple[float, Ending | None] = (ANSWER_S, None)
    state: str = ""
    stack: str = ""
    after_release: tuple[float, Ending | None] = (ANSWER_S, None)
    heeds: bool = False
    has_ended: bool = False
    is_gone: bool = False


class Script:
    """A job and its events; times are seconds since its beginning.

    Args:
        count: The number of instances, all of which connect at once.
        hosts: Their hosts; without names, all run on node0, as mpirun does.
        connected: The number of instances that connect.
        across: Attributes of `Across`.
    """

    def __init__(self, count: int = 2, hosts: str = "", connected: int | None = None, **across: Any) -> None:
        self.now_s = BEGIN_S
        self.machine = JobMachine(count, Across(**across), "node0", self.now_s)
        self.instances = [Instance(host) for host in (hosts.split() or ["node0"] * count)]
        self.done: list[tuple[float, Action]] = []
        self.mpirun_heeds = {1: True, 9: True}
        self.mpirun_ends_with = 0
        self._mpirun_is_over = False
        self._mpirun_waits = False
        self._is_over = False
        self._tick = Tick()
        self._order = itertools.count()
        self._coming: list[tuple[float, int, Event | Callable[[], None]]] = []
        for index in range(count if connected is None else connected):
            self._tell(MemberConnected(index, 100 + index, self.instances[index].host))
        self._tell(self._tick)

    # Events

    def at(self, at_s: float, *events: Event | Callable[[], None]) -> None:
        """Schedule events or changes `at_s` seconds after the beginning."""
        for event in events:
            heapq.heappush(self._coming, (BEGIN_S + at_s, next(self._order), event))

    def end(self, at_s: float, index: int, ending: Ending) -> None:
        """End a program at `at_s`; it leaves no process behind."""
        self.at(at_s, lambda: self._end(index, replace(ending, at_s=BEGIN_S + at_s)))

    def lose(self, at_s: float, *indices: int, fault: str = "") -> None:
        """Break the connections to some agents at `at_s`, and remove the agents."""
        for index in indices:
            self.at(at_s, InstanceChanged(index, LOST, fault), lambda index=index: self._forget(index))

    def note(self, at_s: float, index: int, record: ProgressRecord) -> None:
        """Replace an instance's progress record at `at_s`."""
        self.at(at_s, lambda: setattr(self.instances[index], "record", record))

    def change_record(self, index: int, **changes: Any) -> None:
        """Change the progress record of an instance."""
        self.instances[index].record = replace(self.instances[index].record, **changes)

    def take_roles(self, at_s: float, roles: str) -> None:
        """Give instances their roles at `at_s`, after a change that has considered the latest wish.

        Args:
            at_s: The time.
            roles: A letter for each instance: `t` if it trains, `s` for a spare, `f` for fixed, `-` for lost.
        """

        def change() -> None:
            for each, letter in zip(self.instances, roles, strict=True):
                role = {"t": Role.ACTIVE, "s": Role.SPARE, "f": Role.FIXED, "-": each.record.role}[letter]
                each.record = replace(each.record, role=role, considered=each.record.wanted.number)

        self.at(at_s, change)

    def ask_resize(self, at_s: float, asker: int, *counts: int, leave: tuple[str, ...] = (), **more: Any) -> None:
        """Send poprun a request of `poprun resize`."""
        self.at(at_s, ResizeAsked(asker, ResizeRequest(*counts, leave=leave, **more)))

    def interrupt(self, at_s: float, number: int) -> None:
        """Send poprun a signal."""
        self.at(at_s, SignalCame(number))

    def see(self, at_s: float, **changes: Any) -> None:
        """Change attributes of the following `Tick`s."""
        self.at(at_s, lambda: setattr(self, "_tick", replace(self._tick, **changes)))

    def end_mpirun(self, at_s: float, status: int) -> None:
        """End mpirun at `at_s` with a status."""
        self.at(at_s, lambda: setattr(self, "_mpirun_is_over", True))
        self.see(at_s, mpirun_status=status)

    # Results

    def run(self, until_s: float = 10_000.0) -> None:
        """Let time pass until the job is over or `until_s` is reached."""
        while not self._is_over:
            next_s = min(self.machine.deadline_s, self._coming[0][0] if self._coming else float("inf"))
            if next_s > BEGIN_S + until_s:
                self.now_s = BEGIN_S + until_s
                return
            self.now_s = max(self.now_s, next_s)
            while self._coming and self._coming[0][0] <= self.now_s:
                event = heapq.heappop(self._coming)[2]
                if callable(event):
                    event()
                else:
                    self._tell(event)
            self._tell(self._tick)

    @property
    def ended(self) -> JobEnd:
        """Return how the job ended, which it must have."""
        (finish,) = self.all_of(Finish)
        ended: JobEnd = finish.ended
        return ended

    @property
    def exit_status(self) -> int:
        return self.ended.exit_status

    @property
    def verdict(self) -> Verdict:
        verdict = self.ended.verdict
        assert verdict is not None
        return verdict

    @property
    def over_s(self) -> float:
        """Return the time at which the job was over."""
        return self.times_of(Finish)[0]

    @property
    def closed_s(self) -> float:
        """Return the time at which poprun decided to end everything."""
        return min(self.times_of(STOP))

    def all_of(self, kind: type[Action] | Command | DeedKind) -> list[Any]:
        """Return the actions of one kind, in order."""
        return [action for _, action in self.done if kind_of(action) is kind]

    def times_of(self, kind: type[Action] | Command | DeedKind) -> list[float]:
        """Return when there were actions of one kind, to the microsecond."""
        return [round(at_s, 6) for at_s, action in self.done if kind_of(action) is kind]

    def said(self, level: Level = Level.ERROR) -> list[str]:
        """Return poprun's own messages of one level."""
        return [action.text for action in self.all_of(Say) if action.level is level]

    # Mechanics

    def _tell(self, event: Event) -> None:
        assert not self._is_over, "nothing follows Finish"
        for action in self.machine.advance(event, self.now_s):
            self.done.append((self.now_s - BEGIN_S, action))
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case AgentOrder(command, index, number):
                self._obey(command, index, number)
            case Deed(DeedKind.SEND_TO_MPIRUN, number):
                if self.mpirun_heeds[number] and not self._mpirun_is_over:
                    self._end_mpirun(128 + number)
            case Finish():
                self._is_over = True

    def _obey(self, command: Command, index: int, number: int) -> None:
        each = self.instances[index]
        if command is ASK and each.answers and not each.has_ended:
            self._later(lambda: self._answer(index))
        elif command is STOP and each.stops:
            self._later(lambda: self._stop(index))
        elif command is PASS_ON:
            self._end_later(index, *each.after_signal)
        elif command is RELEASE:
            if each.heeds:
                each.record = replace(each.record, heeded=number)
            self._end_later(index, *each.after_release)
        elif command is WANT_ACTIVE:
            each.record = replace(each.record, wanted=Wanted.unpack(number))
        elif command is EXAMINE and each.state:
            self._later(lambda: self._tell(InstanceChanged(index, EXAMINED, each.state + each.stack)))

    def _answer(self, index: int) -> None:
        each = self.instances[index]
        self._tell(ProgressCame(index, each.record, each.is_stopped, self.now_s if each.works else 0.0))

    def _later(self, deed: Callable[[], None], after_s: float = ANSWER_S) -> None:
        self.at(self.now_s - BEGIN_S + after_s, deed)

    def _end_later(self, index: int, after_s: float, ending: Ending | None) -> None:
        if ending is not None:
            self.end(self.now_s - BEGIN_S + after_s, index, ending)

    def _end(self, index: int, ending: Ending) -> None:
        if not self.instances[index].has_ended:
            self.instances[index].has_ended = True
            self._tell(InstanceEnded(index, ending))
            self._tell(InstanceChanged(index, CLOSED))

    def _stop(self, index: int) -> None:
        each = self.instances[index]
        if each.is_gone:
            return
        self._end(index, killed(told=True, at_s=self.now_s))
        self._tell(InstanceChanged(index, LOST))
        self._forget(index)

    def _forget(self, index: int) -> None:
        self.instances[index].has_ended = self.instances[index].is_gone = True
        if all(each.is_gone for each in self.instances) and not self._mpirun_is_over and not self._mpirun_waits:
            self._end_mpirun(self.mpirun_ends_with)

    def _end_mpirun(self, status: int) -> None:
        self._mpirun_is_over = True
        self.see(self.now_s - BEGIN_S + ANSWER_S, mpirun_status=status)

    def hold_mpirun(self) -> None:
        """Let mpirun go on after its instances have ended."""
        self._mpirun_waits = True


def is_over(script: Script) -> bool:
    return script.machine.phase is JobPhase.OVER
