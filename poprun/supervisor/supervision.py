"""The supervision of a job: it passes events to the job's machine, and carries out its actions."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from poprun.cli.log import Level, Log, format_line
from poprun.cli.wording import count, size_text
from poprun.ipc import wire
from poprun.ipc.facts import Facts, JobEnd
from poprun.ipc.processes import end_descendants, heeded
from poprun.ipc.sockets import keep_to_loopback
from poprun.ipc.streams import InputSource
from poprun.launch.launch import Across
from poprun.monitor.snapshot import Recent, Seen, look_at_all
from poprun.monitor.viewers import Viewers
from poprun.output.output import Output
from poprun.supervisor.control import InputWanted, read_reports
from poprun.supervisor.job_events import (
    LOOK_S,
    Action,
    AgentOrder,
    Answer,
    CleanUp,
    Deed,
    DeedKind,
    Event,
    Finish,
    InstanceChange,
    InstanceChanged,
    MemberConnected,
    OutputPiece,
    ProgressCame,
    ResizeAsked,
    Say,
    SignalCame,
    Tick,
)
from poprun.supervisor.job_machine import JobMachine, JobPhase
from poprun.supervisor.reception import Member, strangers_to_leave
from poprun.supervisor.signals import INTERRUPTS, PASSED_ON
from poprun.supervisor.starting import StartedJob

END_LIMIT_S = 1.0
"""The time limit for killed processes to be gone."""


class JobSupervisor:
    """One running job; call `run` once.

    Args:
        started: The job, whose mpirun runs.
        count: The number of instances that it starts.
        output: The destination of the instances' output.
        log: The log for poprun's own messages.
        across: The settings for several hosts, and the limits of waits.
        environ: The environment of mpirun.
        viewers: The connections of `poprun top`.

    Attributes:
        machine: The state machine of the job; it remains after the job has ended.
    """

    def __init__(
        self,
        started: StartedJob,
        count: int,
        output: Output,
        log: Log,
        across: Across,
        environ: Mapping[str, str],
        viewers: Viewers,
    ) -> None:
        self._viewers = viewers
        self._recent = Recent()
        self._started = started
        self._wakeup, self._reception, self._mpirun = started.wakeup, started.reception, started.mpirun
        self._mpirun_outputs = [self._mpirun.stdout, self._mpirun.stderr]
        self._count = count
        self._across = across
        self._output = output
        self._log = log
        self._environ = environ
        self._input = InputSource()
        self._connections: list[Member] = []
        self._members: dict[int, Member] = {}
        self._damaged: set[int] = set()
        self._is_mpirun_stopped = False
        self._looked_at_s = 0.0
        self._ended: JobEnd | None = None
        self.machine = JobMachine(count, across, os.uname().nodename, started.began_s)

    def run(self) -> JobEnd:
        """Run the job to its end. Some output may still be held back; `Output.finish` shows it."""
        try:
            self._say(Level.INFO, f"waiting for mpirun ({self._mpirun.pid})")
            while self._ended is None:
                self._wait()
                for asker, request in self._viewers.take_requests():
                    self._tell(ResizeAsked(asker, request))
                self._tell(self._tick(time.monotonic()))
                self._show_status()
                now_s = time.monotonic()
                self._viewers.push(now_s, partial(self._look, now_s), self.machine.losses)
        finally:
            self._reception.close()
        for number in heeded(INTERRUPTS):  # from here on, only a slow reader can delay poprun
            signal.signal(number, signal.SIG_DFL)
        return self._ended

    # Events that come in.

    def _wait(self) -> None:
        poll = select.poll()
        handlers: dict[int, Callable[[], None]] = {self._wakeup: self._take_signals}
        if self._reception.is_ready(time.monotonic()):
            handlers[self._reception.fileno()] = self._accept
        for descriptor in self._mpirun_outputs:
            handlers[descriptor] = partial(self._read_mpirun, descriptor)
        takes_output = not self._output.is_behind or self.machine.phase is not JobPhase.RUNNING
        for member in self._connections:
            if takes_output or member.index < 0:
                handlers[member.fileno()] = partial(self._take, member)
        if self._input.is_ready:
            handlers[self._input.descriptor] = self._pass_input
        for descriptor in handlers:
            poll.register(descriptor, select.POLLIN)
        for sink in self._output.sinks:
            if sink.held_bytes:
                poll.register(sink.descriptor, select.POLLOUT)
                handlers[sink.descriptor] = sink.flush
        for descriptor, events, serve in self._viewers.handlers(time.monotonic()):
            handlers[descriptor] = serve
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll(self._timeout_ms()):
            handlers[descriptor]()
        for stranger in strangers_to_leave(self._connections, self._count, time.monotonic()):
            self._part_from(stranger)

    def _timeout_ms(self) -> int:
        return min(1000, max(0, int(min(self.machine.deadline_s - time.monotonic(), 1.0) * 1000) + 1))

    def _take_signals(self) -> None:
        for number in os.read(self._wakeup, 512):
            if number in (*INTERRUPTS, *PASSED_ON):
                self._tell(SignalCame(number))
        self._mpirun.reap()

    def _pass_input(self) -> None:
        data = self._input.read()
        if 0 in self._members:
            self._members[0].send(wire.pack(wire.STDIN, data))

    def _accept(self) -> None:
        before = self._reception.shortage
        if (member := self._reception.accept(time.monotonic())) is not None:
            self._connections.append(member)
        elif (shortage := self._reception.shortage) and not before:
            self._say(Level.WARN, f"instances cannot report: {shortage}; poprun keeps trying, see `ulimit -n`")

    def _take(self, member: Member) -> None:
        for report in read_reports(member, self._count):
            if isinstance(report, InputWanted):
                self._input.want()
                continue
            if isinstance(report, MemberConnected):
                if not self._members and not self._across.interface:
                    keep_to_loopback(self._mpirun.pid)  # mpirun listens before it starts any process
                self._members[report.instance] = member
            elif isinstance(report, InstanceChanged) and report.change is InstanceChange.LOST:
                self._members.pop(report.instance, None)
            elif isinstance(report, OutputPiece):
                self._output.record(report.instance, report.descriptor, report.data)
            elif isinstance(report, ProgressCame):
                self._recent.note(report.instance, report.record.made)
                if report.record.fault:
                    self._warn_of_page(report.instance, report.record.fault)
            self._tell(report)
        if not member.is_open:
            self._part_from(member)

    def _warn_of_page(self, instance: int, fault: str) -> None:
        if instance not in self._damaged:
            self._damaged.add(instance)
            self._say(
                Level.WARN,
                f"instance {instance}: its progress page was overwritten ({fault}), so the state of its collectives is "
                "unknown; look in its program for code that writes outside of its own memory",
            )

    def _part_from(self, member: Member) -> None:
        self._connections.remove(member)
        member.close()

    def _read_mpirun(self, descriptor: int) -> None:
        data = self._mpirun.read(descriptor)
        if not data:
            self._mpirun_outputs.remove(descriptor)
        elif descriptor == self._mpirun.stdout:
            # Output of logins on other hosts comes here too. It is not output of the job.
            self._output.show_own(2 if self._across.others else 1, data)
        elif self._log.level >= Level.DEBUG:
            self._output.show_own(2, data)

    def _tick(self, now_s: float) -> Tick:
        if now_s >= self._looked_at_s + LOOK_S:
            self._looked_at_s = now_s
            self._is_mpirun_stopped = self._mpirun.is_stopped
        stdout = self._output.stdout
        closed = stdout.fault if stdout.is_closed else None
        return Tick(self._mpirun.status, self._is_mpirun_stopped, self._output.is_behind, closed)

    # Actions that follow.

    def _tell(self, event: Event) -> None:
        for action in self.machine.advance(event, time.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case OutputPiece(instance, descriptor, data):
                self._output.show(instance, descriptor, data)
            case AgentOrder(instance=instance):
                if instance in self._members:
                    self._members[instance].order(action)
            case Deed(kind, number):
                self._do(kind, number)
            case Say(level, text):
                self._say(level, text)
            case Answer(asker, answer):
                self._viewers.answer(asker, answer)
            case CleanUp():
                self._clean_up(action)
            case Finish(ended):
                self._ended = ended

    def _do(self, kind: DeedKind, number: int) -> None:
        match kind:
            case DeedKind.STOP_LISTENING:
                self._reception.close()
            case DeedKind.SEND_TO_MPIRUN:
                self._mpirun.send(number)
            case DeedKind.SHOW_HIDDEN_ERRORS:
                self._output.show_hidden_errors(number)
            case DeedKind.SHOW_COMPLAINT:
                self._output.show_own(2, self._mpirun.complaint)

    def _clean_up(self, action: CleanUp) -> None:
        self._reception.close()
        self._say(Level.INFO, f"mpirun ({self._mpirun.pid}) ended with exit status {self._mpirun.status}")
        end_descendants(END_LIMIT_S)
        self._mpirun.read_rest()
        self._started.tidy(self._mpirun.pid, action.sweeps, action.silent)

    def _show_status(self) -> None:
        is_wanted = self.machine.phase is JobPhase.RUNNING and wants_status(self._log.level, self._environ)
        hosts = len(set(self._output.style.hosts))
        text = status_text(self.machine.facts, hosts, time.monotonic() - self._started.began_s) if is_wanted else ""
        self._output.show_status(text)

    def _look(self, now_s: float) -> tuple[Seen, ...]:
        shows_replicas = self._across.spares > 0 or len(self.machine.carriers) > 1
        carriers = self.machine.carriers[-1].instances if shows_replicas else ()
        return look_at_all(self.machine.facts, self._recent, now_s, carriers, self._across.replicas)

    def _say(self, level: Level, text: str) -> None:
        if level <= self._log.level:
            self._output.show_own(2, format_line(level, text).encode(errors="surrogateescape"))


SHOW_AFTER_S = 0.5
"""The time before the first status line; most jobs on this machine start faster."""


def wants_status(level: Level, environ: Mapping[str, str]) -> bool:
    """Return whether the user wants a status line that is drawn in place; it needs a terminal."""
    return level >= Level.WARN and environ.get("TERM", "dumb") != "dumb"


def status_text(facts: Sequence[Facts], hosts: int, since_s: float) -> str:
    """Return the status line of a job without output, `since_s` after its begin; "" if there is nothing to say."""
    if since_s < SHOW_AFTER_S:
        return ""
    started = sum(each.is_started for each in facts)
    if started < len(facts):
        there = f", {started} of {len(facts)} have started" if started else ""
        spares = sum(each.is_spare and not each.is_reserve for each in facts)
        instances = sum(not each.is_spare for each in facts)
        return f"starting {size_text(instances, spares)} on {count(hosts, 'host')}{there} ({int(since_s)} s)"
    if all(each.ending is None and each.record.has_joined and not each.record.step for each in facts if each.is_needed):
        return f"no step is completed yet: the program loads data or compiles ({int(since_s)} s)"
    return ""
