"""Running a job: starts mpirun, listens to the shims, and ends everything when one instance fails."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial

from poprun import wire
from poprun.command import CONTROL_VARIABLE
from poprun.control import Member, Reception
from poprun.diagnosis import Verdict, Wait, first_cause, has_failed, judge, judge_missing, vain_waits
from poprun.facts import signal_name
from poprun.log import Level, Log, format_line
from poprun.members import Members
from poprun.mpirun import END_SIGNAL, Mpirun
from poprun.output import Output
from poprun.processes import adopt_orphans, descendants, send
from poprun.standard_input import Source
from poprun.terminals import describe_terminals

START_LIMIT_S = 60.0
LOOK_S = 0.2
"""How often instances are asked what they do."""
QUICK_LOOK_S = 0.08
"""The same once an instance has ended or is leaving."""
SETTLE_S = 0.06
"""After the first failure: how long reports under way are waited for before anyone is blamed."""
LEAVE_S = 0.15
"""How long an instance that is to blame and still in its exit handlers may take to show its exit status."""
INTERRUPT_GRACE_S = 0.9
"""How long programs may take to end after Ctrl-C or SIGTERM."""
CLOSE_LIMIT_S = 0.4
"""How long shims may take to end what is left of their instances."""
MPIRUN_LIMIT_S = 0.6
"""How long mpirun may take to end after it was told to; killed, it would leave files behind."""
LAST_WORDS_LIMIT_S = 0.2
"""How long a reader may take for each piece of the last output after an interrupt."""

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_STANDARD_OUTPUT_CLOSED = 128 + signal.SIGPIPE
_NEVER = float("inf")


class Phase(Enum):
    """Where a job is between its start and its end."""

    RUNNING = 1
    SETTLING = 2
    INTERRUPTED = 3
    CLOSING = 4
    OVER = 5


class Supervisor:
    """One running job. `run` is called once.

    Args:
        command: the mpirun command.
        count: how many instances it starts.
        output: where the instances' output goes.
        log: poprun's own words.
    """

    def __init__(self, command: Sequence[str], count: int, output: Output, log: Log) -> None:
        self._command = command
        self._output = output
        self._log = log
        self._input = Source()
        self._members = Members(count, self._show, self._input)
        self._connections: list[Member] = []
        self._verdict: Verdict | None = None
        self._exit_status = 0
        self._was_interrupted = False
        self._phase = Phase.RUNNING
        self._deadline_s = _NEVER
        self._next_look_s = _NEVER
        self._waits: frozenset[Wait] = frozenset()
        self._in_vain: frozenset[Wait] = frozenset()
        self._withheld: list[tuple[int, int, bytes]] = []
        self._released: int | None = None
        self._last_resort = iter((END_SIGNAL, signal.SIGKILL))

    def run(self, environ: Mapping[str, str]) -> int:
        """Run the job to its end and return poprun's exit status."""
        adopt_orphans()
        self._wakeup = _catch_signals()
        self._reception = Reception(environ)
        try:
            contact = f"{self._reception.address} {describe_terminals()}"
            self._mpirun = Mpirun(self._command, {**environ, CONTROL_VARIABLE: contact})
            self._say(Level.INFO, f"waiting for mpirun ({self._mpirun.pid})")
            self._mpirun_outputs = [self._mpirun.stdout, self._mpirun.stderr]
            self._deadline_s = time.monotonic() + START_LIMIT_S
            self._next_look_s = time.monotonic() + LOOK_S
            while self._phase is not Phase.OVER:
                self._wait()
                self._advance(time.monotonic())
        finally:
            self._reception.close()
        self._mpirun.tidy(environ)
        self._say(Level.INFO, f"mpirun ({self._mpirun.pid}) ended with exit status {self._mpirun.status}")
        return self._finish()

    # What comes in.

    def _wait(self) -> None:
        poll = select.poll()
        handlers: dict[int, Callable[[], None]] = {self._wakeup: self._take_signals}
        if self._reception.is_open:
            handlers[self._reception.fileno()] = self._accept
        for descriptor in self._mpirun_outputs:
            handlers[descriptor] = partial(self._read_mpirun, descriptor)
        if not self._output.is_behind or self._phase is not Phase.RUNNING:
            for member in self._connections:
                handlers[member.fileno()] = partial(self._take, member)
        if self._input.is_ready:
            handlers[self._input.descriptor] = self._pass_input
        for descriptor in handlers:
            poll.register(descriptor, select.POLLIN)
        for sink in self._output.sinks:
            if sink.held_bytes:
                poll.register(sink.descriptor, select.POLLOUT)
                handlers[sink.descriptor] = sink.flush
        for descriptor, _ in poll.poll(self._timeout_ms()):
            handlers[descriptor]()

    def _timeout_ms(self) -> int:
        soonest = min(self._deadline_s, self._next_look_s)
        return min(1000, max(0, int((soonest - time.monotonic()) * 1000) + 1))

    def _take_signals(self) -> None:
        for number in os.read(self._wakeup, 512):
            if number in _INTERRUPTS:
                self._interrupt(number)
            elif number in _PASSED_ON:
                self._members.tell(wire.pack_number(wire.SIGNAL, number))
        self._mpirun.reap()

    def _pass_input(self) -> None:
        self._members.tell_one(0, wire.pack(wire.STDIN, self._input.read()))

    def _accept(self) -> None:
        member = self._reception.accept()
        self._connections.append(member)
        if self._phase is Phase.CLOSING:
            member.send(wire.pack(wire.STOP))

    def _take(self, member: Member) -> None:
        self._members.take(member)
        if not member.is_open:
            self._connections.remove(member)
            member.close()
        if self._members.all_connected:
            self._reception.close()

    def _read_mpirun(self, descriptor: int) -> None:
        data = self._mpirun.read(descriptor)
        if not data:
            self._mpirun_outputs.remove(descriptor)
        elif descriptor == self._mpirun.stdout:
            self._output.stdout.write_own(data)
        elif self._log.level >= Level.DEBUG:
            self._output.stderr.write_own(data)

    def _show(self, instance: int, descriptor: int, data: bytes) -> None:
        if self._phase is Phase.SETTLING:
            self._withheld.append((instance, descriptor, data))
        elif self._phase is not Phase.CLOSING or self._is_blamed(instance):
            self._output.show(instance, descriptor, data)

    def _is_blamed(self, instance: int) -> bool:
        return self._verdict is not None and self._verdict.instance == instance

    # What follows from it.

    def _advance(self, now_s: float) -> None:
        if self._phase is Phase.RUNNING:
            self._watch(now_s)
        elif self._phase is Phase.SETTLING:
            self._settle(now_s)
        elif self._phase is Phase.INTERRUPTED:
            if now_s >= self._deadline_s or (self._members.all_ended and self._members.all_closed):
                self._close(now_s)
        elif self._phase is Phase.CLOSING:
            self._see_off(now_s)

    def _watch(self, now_s: float) -> None:
        members = self._members
        if self._output.stdout.is_closed:
            self._exit_status = _STANDARD_OUTPUT_CLOSED
            self._close(now_s)
        elif members.all_succeeded:
            if members.all_closed:
                self._close(now_s)
        elif has_failed(members.facts) or members.all_ended or self._cannot_go_on(now_s):
            self._begin_to_settle(now_s)
        else:
            if any(each.is_gone for each in members.facts):
                self._next_look_s = min(self._next_look_s, now_s + QUICK_LOOK_S)
            if now_s >= self._next_look_s:
                self._look(now_s)

    def _cannot_go_on(self, now_s: float) -> bool:
        is_late = now_s >= self._deadline_s and not self._members.all_connected
        return self._mpirun.status is not None or is_late

    def _look(self, now_s: float) -> None:
        """Ask everyone what they do, and compare the answers to the last question with those before."""
        facts = self._members.facts
        waits = vain_waits(facts)
        self._in_vain = waits & self._waits
        self._waits = waits
        if self._in_vain:
            self._begin_to_settle(now_s)
            return
        self._members.ask()
        self._next_look_s = now_s + LOOK_S
        if self._members.all_connected:
            self._deadline_s = _NEVER

    def _begin_to_settle(self, now_s: float) -> None:
        self._phase = Phase.SETTLING
        self._members.ask()
        self._deadline_s = now_s + SETTLE_S
        self._next_look_s = _NEVER

    def _settle(self, now_s: float) -> None:
        facts = self._members.facts
        cause = first_cause(facts, self._in_vain)
        if self._released is not None and facts[self._released].ending is not None:
            self._conclude(now_s)
        elif now_s < self._deadline_s:
            return
        elif cause is not None and facts[cause].ending is None and self._released is None:
            self._released = cause
            self._members.tell_one(cause, wire.pack(wire.RELEASE))
            self._deadline_s = now_s + LEAVE_S
        else:
            self._conclude(now_s)

    def _conclude(self, now_s: float) -> None:
        self._verdict = judge(self._members.facts, self._in_vain)
        if self._verdict is None:
            self._verdict = judge_missing(self._members.facts, self._mpirun.status)
        self._exit_status = self._verdict.exit_status
        self._close(now_s)
        for instance, descriptor, data in self._withheld:
            self._show(instance, descriptor, data)

    def _interrupt(self, number: int) -> None:
        if self._phase in (Phase.RUNNING, Phase.SETTLING):
            self._phase = Phase.INTERRUPTED
            self._was_interrupted = True
            self._exit_status = 128 + number
            name = signal_name(number)
            self._verdict = Verdict(None, 128 + number, (f"poprun was told to end by {name}, so all ended",))
            self._members.tell(wire.pack_number(wire.SIGNAL, number))
            self._deadline_s = time.monotonic() + INTERRUPT_GRACE_S
            self._next_look_s = _NEVER
        elif self._phase is Phase.INTERRUPTED:
            self._close(time.monotonic())

    def _close(self, now_s: float) -> None:
        self._phase = Phase.CLOSING
        self._members.tell(wire.pack(wire.STOP))
        self._deadline_s = now_s + CLOSE_LIMIT_S
        self._next_look_s = _NEVER

    def _see_off(self, now_s: float) -> None:
        if self._mpirun.status is not None and not self._connections:
            self._phase = Phase.OVER
        elif now_s >= self._deadline_s:
            number = next(self._last_resort, None)
            if number is None:
                self._phase = Phase.OVER
            else:
                self._mpirun.send(number)
                self._deadline_s = now_s + MPIRUN_LIMIT_S

    # The end.

    def _finish(self) -> int:
        _end_all(descendants(os.getpid()))
        self._mpirun.read_rest()
        verdict = self._verdict
        if verdict is not None and verdict.instance is not None:
            self._output.show_hidden_errors(verdict.instance)
        if verdict is not None and verdict.is_unexplained:
            self._output.stderr.write_own(self._mpirun.complaint)
        for line in verdict.lines if verdict is not None else ():
            self._say(Level.ERROR, line)
        for number in _INTERRUPTS:  # from here on nothing but a slow reader can keep us
            signal.signal(number, signal.SIG_DFL)
        self._output.finish(limit_s=LAST_WORDS_LIMIT_S if self._was_interrupted else None)
        return self._exit_status

    def _say(self, level: Level, text: str) -> None:
        if level <= self._log.level:
            self._output.stderr.write_own(format_line(level, text).encode(errors="surrogateescape"))


def _catch_signals() -> int:
    """Turn signals into bytes in a pipe; its reading end."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (*_INTERRUPTS, *_PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reader


def _end_all(pids: Sequence[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)
