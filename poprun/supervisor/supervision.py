"""Running a job: starts mpirun, tells the job's machine what happens, and does what it says."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from poprun.cli.log import Level, Log, format_line
from poprun.ipc import wire
from poprun.ipc.facts import Ended, Facts
from poprun.ipc.leavings import folder_of, remove_leavings
from poprun.ipc.loopback import keep_to_loopback
from poprun.ipc.processes import adopt_orphans, catch_signals, end_descendants, heeded, ignores_hangup
from poprun.ipc.standard_input import Source
from poprun.ipc.terminals import describe_terminals
from poprun.launch.across import Across
from poprun.monitor.recent import Recent
from poprun.monitor.snapshot import look_at_all
from poprun.monitor.viewers import Viewers
from poprun.output.output import Output
from poprun.supervisor.control import Member, Reception, strangers_to_leave
from poprun.supervisor.job_actions import (
    Action,
    Ask,
    CleanUp,
    Examine,
    Finish,
    Order,
    PassOn,
    Release,
    Say,
    SendToMpirun,
    Show,
    ShowComplaint,
    ShowHiddenErrors,
    Stop,
    StopListening,
)
from poprun.supervisor.job_events import (
    Event,
    MemberConnected,
    MemberLost,
    MpirunEnded,
    MpirunStopped,
    OutputCame,
    OutputIsBehind,
    ProgressCame,
    SignalCame,
    StandardOutputClosed,
    Tick,
)
from poprun.supervisor.job_limits import LOOK_S
from poprun.supervisor.job_machine import INTERRUPTS, PASSED_ON, JobMachine, Phase
from poprun.supervisor.mpirun import Mpirun
from poprun.supervisor.reports import InputWanted, read_reports
from poprun.supervisor.status_line import StatusLine, wants_status

DIRECTORY_OPTIONS = ("--wdir", "-wdir", "--wd", "-wd", "--set-cwd-to-session-dir", "-set-cwd-to-session-dir")
"""With one of these, mpirun is told by the user where instances run."""
END_LIMIT_S = 1.0
"""How long processes may take to be gone that were killed."""
LAST_WORDS_LIMIT_S = 0.2
"""How long a reader may take for each piece of the last output after an interrupt."""


class Supervisor:
    """One running job. `run` is called once.

    Args:
        command: the mpirun command.
        count: how many instances it starts.
        output: where the instances' output goes.
        log: poprun's own words.
        across: how the hosts are reached, where there are several.
        now_s: the clock, that of `time.monotonic`.
        viewers: those who look at the job; None: nobody can.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        output: Output,
        log: Log,
        across: Across,
        now_s: Callable[[], float] = time.monotonic,
        viewers: Viewers | None = None,
    ) -> None:
        self._now_s = now_s
        self._viewers = viewers or Viewers()
        self._recent = Recent()
        self._command = command
        self._count = count
        self._across = across
        self._output = output
        self._log = log
        self._input = Source()
        self._connections: list[Member] = []
        self._members: dict[int, Member] = {}
        self._damaged: set[int] = set()
        self._was_behind = self._was_closed = self._was_stopped = False
        self._looked_at_s = 0.0
        self._ended: Ended | None = None

    def run(self, environ: Mapping[str, str]) -> Ended:
        """Run the job to its end. Output may still be held back, which `Output.finish` shows."""
        adopt_orphans()
        self._environ = environ
        self._wakeup = catch_signals((*INTERRUPTS, *PASSED_ON, signal.SIGCHLD))
        self._reception = Reception(self._across.interface, self._across.silence_s)
        try:
            contact = f"{self._reception.contact} {describe_terminals(self._output.style.columns)}"
            contact += wire.IGNORES_HANGUP * ignores_hangup()
            if not any(word.partition("=")[0] in DIRECTORY_OPTIONS for word in self._command):
                contact = f"{os.getcwd()} {contact}"
            variables = {**environ, wire.CONTROL_VARIABLE: contact}
            self._mpirun = Mpirun(self._command, variables, lambda pid: self._tidy(pid, sweeps=True))
            self._say(Level.INFO, f"waiting for mpirun ({self._mpirun.pid})")
            self._mpirun_outputs = [self._mpirun.stdout, self._mpirun.stderr]
            self._machine = JobMachine(self._count, self._across, os.uname().nodename, self._now_s())
            hosts = len(set(self._output.style.hosts))
            self._status = StatusLine(self._count, hosts, self._now_s())
            while self._ended is None:
                self._wait()
                self._tell_of_output()
                self._tell_of_mpirun(self._now_s())
                self._tell(Tick())
                self._show_status()
                self._show_viewers()
        finally:
            self._reception.close()
        for number in heeded(INTERRUPTS):  # from here on nothing but a slow reader can keep us
            signal.signal(number, signal.SIG_DFL)
        return self._ended

    @property
    def facts(self) -> Sequence[Facts]:
        """What is known about each instance; also when the job has ended."""
        return self._machine.facts

    @property
    def losses(self) -> Sequence[str]:
        """A line about each instance without which the others have gone on."""
        return self._machine.losses

    # What comes in.

    def _wait(self) -> None:
        poll = select.poll()
        handlers: dict[int, Callable[[], None]] = {self._wakeup: self._take_signals}
        if self._reception.is_ready(self._now_s()):
            handlers[self._reception.fileno()] = self._accept
        for descriptor in self._mpirun_outputs:
            handlers[descriptor] = partial(self._read_mpirun, descriptor)
        takes_output = not self._output.is_behind or self._machine.phase is not Phase.RUNNING
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
        for descriptor, events, serve in self._viewers.handlers(self._now_s()):
            handlers[descriptor] = serve
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll(self._timeout_ms()):
            handlers[descriptor]()
        for stranger in strangers_to_leave(self._connections, self._count, self._now_s()):
            self._part_from(stranger)

    def _timeout_ms(self) -> int:
        return min(1000, max(0, int(min(self._machine.deadline_s - self._now_s(), 1.0) * 1000) + 1))

    def _take_signals(self) -> None:
        for number in os.read(self._wakeup, 512):
            if number in (*INTERRUPTS, *PASSED_ON):
                self._tell(SignalCame(number))
        before = self._mpirun.status
        self._mpirun.reap()
        if before is None and self._mpirun.status is not None:
            self._tell(MpirunEnded(self._mpirun.status))

    def _pass_input(self) -> None:
        data = self._input.read()
        if 0 in self._members:
            self._members[0].send(wire.pack(wire.STDIN, data))

    def _accept(self) -> None:
        before = self._reception.shortage
        if (member := self._reception.accept(self._now_s())) is not None:
            self._connections.append(member)
        elif (shortage := self._reception.shortage) and not before:
            self._say(Level.WARN, f"instances cannot report: {shortage}; poprun goes on trying, see `ulimit -n`")

    def _take(self, member: Member) -> None:
        for report in read_reports(member, self._count):
            if isinstance(report, InputWanted):
                self._input.want()
                continue
            if isinstance(report, MemberConnected):
                if not self._members and not self._across.interface:
                    keep_to_loopback(self._mpirun.pid)  # it listens before it starts anything
                self._members[report.instance] = member
            elif isinstance(report, MemberLost):
                self._members.pop(report.instance, None)
            elif isinstance(report, OutputCame):
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
                f"instance {instance}: its progress page was overwritten ({fault}), so nothing is known about its "
                "collectives; look for what writes to memory of others in its program",
            )

    def _part_from(self, member: Member) -> None:
        self._connections.remove(member)
        member.close()

    def _read_mpirun(self, descriptor: int) -> None:
        data = self._mpirun.read(descriptor)
        if not data:
            self._mpirun_outputs.remove(descriptor)
        elif descriptor == self._mpirun.stdout:
            # What logins on other hosts print comes here too, and is no output of the job.
            self._output.show_own(2 if self._across.others else 1, data)
        elif self._log.level >= Level.DEBUG:
            self._output.show_own(2, data)

    def _tell_of_output(self) -> None:
        if self._output.is_behind != self._was_behind:
            self._was_behind = not self._was_behind
            self._tell(OutputIsBehind(self._was_behind))
        if self._output.stdout.is_closed and not self._was_closed:
            self._was_closed = True
            self._tell(StandardOutputClosed(self._output.stdout.fault))

    def _tell_of_mpirun(self, now_s: float) -> None:
        if now_s < self._looked_at_s + LOOK_S:
            return
        self._looked_at_s = now_s
        if self._mpirun.is_stopped != self._was_stopped:
            self._was_stopped = not self._was_stopped
            self._tell(MpirunStopped(self._was_stopped))

    # What follows from it.

    def _tell(self, event: Event) -> None:
        for action in self._machine.advance(event, self._now_s()):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Show(instance, descriptor, data):
                self._output.show(instance, descriptor, data)
            case Ask() | Examine() | Release() | PassOn() | Stop():
                if action.instance in self._members:
                    self._members[action.instance].send(pack_order(action))
            case Say(level, text):
                self._say(level, text)
            case SendToMpirun(number):
                self._mpirun.send(number)
            case StopListening():
                self._reception.close()
            case CleanUp():
                self._clean_up(action)
            case ShowHiddenErrors(instance):
                self._output.show_hidden_errors(instance)
            case ShowComplaint():
                self._output.show_own(2, self._mpirun.complaint)
            case Finish(ended):
                self._ended = ended

    def _clean_up(self, action: CleanUp) -> None:
        self._reception.close()
        self._say(Level.INFO, f"mpirun ({self._mpirun.pid}) ended with exit status {self._mpirun.status}")
        end_descendants(END_LIMIT_S)
        self._mpirun.read_rest()
        self._tidy(self._mpirun.pid, action.sweeps, action.silent)

    def _tidy(self, mpirun: int, sweeps: bool, silent: Collection[str] = ()) -> None:
        """Remove what is left when nothing runs here any more."""
        if sweeps and self._across.others:
            from poprun.hosts.sweep import sweep

            sweep(self._across.others, silent, self._across.ssh, f"{os.uname().nodename}-{mpirun}", dict(self._environ))
        remove_leavings(folder_of(self._environ), [mpirun])

    def _show_status(self) -> None:
        is_wanted = self._machine.phase is Phase.RUNNING and wants_status(self._log.level, self._environ)
        self._output.show_status(self._status.text(self._machine.facts, self._now_s()) if is_wanted else "")

    def _show_viewers(self) -> None:
        now_s = self._now_s()
        self._viewers.push(now_s, lambda: look_at_all(self.facts, self._recent, now_s), len(self.losses))

    def _say(self, level: Level, text: str) -> None:
        if level <= self._log.level:
            self._output.show_own(2, format_line(level, text).encode(errors="surrogateescape"))


def pack_order(order: Order) -> bytes:
    """The message that tells an agent what it is to do."""
    match order:
        case Ask():
            return wire.pack(wire.REPORT)
        case Examine():
            return wire.pack(wire.EXAMINE)
        case Release(lost=lost):
            return wire.pack_number(wire.RELEASE, lost)
        case PassOn(number=number):
            return wire.pack_number(wire.SIGNAL, number)
        case Stop():
            return wire.pack(wire.STOP)
