"""Running a job: starts mpirun, listens to the shims, and ends everything when one instance fails."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from poprun import wire
from poprun.control import Member, Reception
from poprun.diagnosis import MOST_LINES, Verdict, first_cause, has_failed
from poprun.facts import Ending, EndKind, Facts, signal_name
from poprun.log import Level, Log, format_line
from poprun.lookout import Lookout
from poprun.members import Members
from poprun.mpirun import END_SIGNAL, Mpirun
from poprun.output import Output
from poprun.processes import adopt_orphans, catch_signals, descendants, send
from poprun.standard_input import Source
from poprun.survival import Survival
from poprun.terminals import describe_terminals
from poprun.wording import count

LOOK_S = 0.2
"""How often instances are asked what they do."""
QUICK_LOOK_S = 0.08
"""The same once an instance has ended or is leaving."""
SETTLE_S = 0.06
"""After the first failure: how long reports under way are waited for before anyone is blamed."""
SETTLE_LIMIT_S = 0.5
"""The same where an instance has not answered yet what it does, as on a machine with too few cores."""
LOST_HOST_SETTLE_S = 0.5
"""The same where mpirun has ended before its instances: those on a host whose daemon is gone end by and by."""
EXAMINE_S = 5.0
"""How long an instance that is stuck may take to show where; its shim waits less long for it."""
LEAVE_S = 0.5
"""How long an instance that is to blame and still in its exit handlers may take to heed that it is released."""
LEAVE_LIMIT_S = 3.0
"""How long it may then take to show its exit status."""
INTERRUPT_GRACE_S = 0.9
"""How long programs may take to end after Ctrl-C or SIGTERM, unless they have said that they need longer to save."""
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


@dataclass(frozen=True)
class Across:
    """What a job on several hosts needs to know.

    Attributes:
        interface: our address that the other hosts reach; "" where there are none.
        silence_s: after which silence a host counts as gone.
        start_timeout_s: how long it may take until all instances have started.
        least: with how many instances the job goes on when others are lost; 0: with all only.
        stuck_timeout_s: how long an instance that others wait for may do nothing; 0: for ever.
        others: the hosts besides this machine.
        ssh: the words of ssh before a host.
    """

    interface: str = ""
    silence_s: float = 10.0
    start_timeout_s: float = 60.0
    least: int = 0
    stuck_timeout_s: float = 0.0
    others: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        exit_status: poprun's, if this was all.
        was_told: whether the user told it to end, or reads its output no more.
        verdict: why it failed; None: it did not.
    """

    exit_status: int
    was_told: bool
    verdict: Verdict | None


class Supervisor:
    """One running job. `run` is called once.

    Args:
        command: the mpirun command.
        count: how many instances it starts.
        output: where the instances' output goes.
        log: poprun's own words.
        across: how the hosts are reached, where there are several.
    """

    def __init__(self, command: Sequence[str], count: int, output: Output, log: Log, across: Across = Across()) -> None:
        self._command = command
        self._across = across
        self._output = output
        self._log = log
        self._input = Source()
        self._members = Members(count, self._take_output, self._input)
        self._survival = Survival(self._members, across.least)
        self._lookout = Lookout(across.stuck_timeout_s)
        self._connections: list[Member] = []
        self._verdict: Verdict | None = None
        self._exit_status = 0
        self._was_interrupted = False
        self._phase = Phase.RUNNING
        self._deadline_s = _NEVER
        self._settle_limit_s = _NEVER
        self._interrupted_at_s = _NEVER
        self._next_look_s = _NEVER
        self._withheld: list[tuple[int, int, bytes]] = []
        self._released: int | None = None
        self._passed_on: set[int] = set()
        self._last_resort = iter((END_SIGNAL, signal.SIGKILL))

    def run(self, environ: Mapping[str, str]) -> Ended:
        """Run the job to its end. Output may still be held back, which `Output.finish` shows."""
        adopt_orphans()
        self._wakeup = catch_signals((*_INTERRUPTS, *_PASSED_ON, signal.SIGCHLD))
        self._reception = Reception(self._across.interface, self._across.silence_s)
        try:
            contact = f"{self._reception.contact} {describe_terminals(self._output.style.columns)}"
            self._mpirun = Mpirun(self._command, {**environ, wire.CONTROL_VARIABLE: contact})
            self._say(Level.INFO, f"waiting for mpirun ({self._mpirun.pid})")
            self._mpirun_outputs = [self._mpirun.stdout, self._mpirun.stderr]
            self._deadline_s = time.monotonic() + self._across.start_timeout_s
            self._next_look_s = time.monotonic() + LOOK_S
            while self._phase is not Phase.OVER:
                self._wait()
                self._advance(time.monotonic())
        finally:
            self._reception.close()
        self._sweep(environ)
        self._mpirun.tidy(environ)
        self._say(Level.INFO, f"mpirun ({self._mpirun.pid}) ended with exit status {self._mpirun.status}")
        self._finish()
        closed = self._exit_status == _STANDARD_OUTPUT_CLOSED
        was_told = self._was_interrupted or closed or self._exit_status - 128 in self._passed_on
        return Ended(self._exit_status, was_told, self._verdict)

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
                self._passed_on.add(number)
                self._members.tell(wire.pack_number(wire.SIGNAL, number))
        self._mpirun.reap()

    def _pass_input(self) -> None:
        self._members.tell_one(0, wire.pack(wire.STDIN, self._input.read()))

    def _accept(self) -> None:
        member = self._reception.accept()
        if member is None:
            return
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
            self._output.show_own(1, data)
        elif self._log.level >= Level.DEBUG:
            self._output.show_own(2, data)

    def _take_output(self, instance: int, descriptor: int, data: bytes) -> None:
        self._output.record(instance, descriptor, data)
        self._show(instance, descriptor, data)

    def _show(self, instance: int, descriptor: int, data: bytes) -> None:
        if self._phase is Phase.SETTLING:
            self._withheld.append((instance, descriptor, data))
        elif self._phase is not Phase.CLOSING or self._is_blamed(instance):
            self._output.show(instance, descriptor, data)

    def _show_withheld(self) -> None:
        withheld, self._withheld = self._withheld, []
        for instance, descriptor, data in withheld:
            self._show(instance, descriptor, data)

    def _is_blamed(self, instance: int) -> bool:
        return self._verdict is not None and self._verdict.instance == instance

    # What follows from it.

    def _advance(self, now_s: float) -> None:
        if self._phase is Phase.RUNNING:
            self._watch(now_s)
        elif self._phase is Phase.SETTLING:
            self._settle(now_s)
        elif self._phase is Phase.INTERRUPTED:
            self._give_up()  # or the others could not save
            self._keep_interrupt_deadline(now_s)
            if now_s >= self._deadline_s or (self._members.all_ended and self._members.all_closed):
                self._close(now_s)
        elif self._phase is Phase.CLOSING:
            self._see_off(now_s)

    def _watch(self, now_s: float) -> None:
        members = self._members
        if self._output.stdout.is_closed:
            self._exit_status = _STANDARD_OUTPUT_CLOSED
            if fault := self._output.stdout.fault:
                text = f"standard output cannot be written: {fault}; the job ends, for nobody would see what it says"
                self._say(Level.ERROR, text)
            self._close(now_s)
        elif members.all_succeeded:
            if members.all_closed:
                self._close(now_s)
        elif has_failed(members.facts) or members.all_ended or self._cannot_go_on(now_s):
            if not self._give_up_the_failed():
                self._begin_to_settle(now_s)
        else:
            if any(each.is_gone for each in members.facts):
                self._next_look_s = min(self._next_look_s, now_s + QUICK_LOOK_S)
            if now_s >= self._next_look_s:
                self._look(now_s)

    def _give_up_the_failed(self) -> bool:
        """Let the others go on without those that have failed, are stuck, or left too early; False if they cannot."""
        if not self._give_up():
            return False
        self._phase = Phase.RUNNING
        self._released = None
        now_s = time.monotonic()
        self._lookout.forget(now_s)
        self._deadline_s, self._next_look_s = _NEVER, now_s + LOOK_S
        return True

    def _give_up(self) -> bool:
        if self._mpirun.status is not None:
            return False
        lines = self._survival.give_up(self._lookout.useless, self._was_told, self._describe_failure)
        for line in lines:
            self._say(Level.WARN, line)
        return bool(lines)

    def _was_told(self, ending: Ending) -> bool:
        """Whether it ended by a signal that was passed on, or by itself after it was told to."""
        is_own_end = ending.kind is EndKind.EXIT and ending.at_s >= self._interrupted_at_s
        return is_own_end or ending.exit_status - 128 in {*self._passed_on, self._exit_status - 128}

    def _describe_failure(self, failed: Facts) -> str:
        return self._lookout.describe(failed, self._members.facts)

    def _cannot_go_on(self, now_s: float) -> bool:
        is_late = now_s >= self._deadline_s and not self._members.all_connected
        return self._mpirun.status is not None or is_late

    def _look(self, now_s: float) -> None:
        """Look at the answers to the last question, and ask everyone again what they do."""
        self._lookout.look(self._members.facts, now_s, self._output.is_behind)
        if self._lookout.in_vain:
            if not self._give_up_the_failed():
                self._begin_to_settle(now_s)
        elif self._lookout.stuck is not None:
            self._examine(now_s, self._lookout.stuck)
        else:
            self._members.ask()
            self._next_look_s = now_s + LOOK_S
            if self._members.all_connected:
                self._deadline_s = _NEVER

    def _begin_to_settle(self, now_s: float) -> None:
        self._phase = Phase.SETTLING
        self._members.ask()
        is_left_alone = self._mpirun.status is not None and self._across.others
        self._deadline_s = now_s + (LOST_HOST_SETTLE_S if is_left_alone else SETTLE_S)
        self._settle_limit_s = now_s + SETTLE_LIMIT_S
        self._next_look_s = _NEVER

    def _examine(self, now_s: float, stuck: int) -> None:
        """Have an instance that is stuck show where it is, if it can."""
        self._phase = Phase.SETTLING
        self._members.tell_one(stuck, wire.pack(wire.EXAMINE))
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
        elif self._members.are_asked and now_s < self._settle_limit_s:
            self._deadline_s = min(now_s + SETTLE_S, self._settle_limit_s)
        elif cause is not None and facts[cause].ending is None:
            self._released = cause
            self._members.tell_one(cause, wire.pack_number(wire.RELEASE, len(facts)))
            self._deadline_s, self._next_look_s = now_s + LEAVE_S, now_s + QUICK_LOOK_S
        else:
            self._conclude(now_s)

    def _see_out(self, now_s: float, released: Facts) -> None:
        """Wait for the exit status of an instance that was released, longer if it has heeded that."""
        if released.ending is not None or now_s >= self._deadline_s:
            self._conclude(now_s)
        elif now_s >= self._next_look_s:
            if released.record.heeded < len(self._members.facts):
                self._members.ask()
                self._next_look_s = now_s + QUICK_LOOK_S
            else:
                self._deadline_s, self._next_look_s = self._deadline_s + LEAVE_LIMIT_S, _NEVER

    def _conclude(self, now_s: float) -> None:
        if not self._give_up_the_failed():
            self._verdict = self._lookout.judge(self._members.facts, self._mpirun.status)
            self._exit_status = self._verdict.exit_status
            self._close(now_s)
        self._show_withheld()

    def _interrupt(self, number: int) -> None:
        if self._phase in (Phase.RUNNING, Phase.SETTLING):
            self._phase = Phase.INTERRUPTED
            self._was_interrupted = True
            self._exit_status = 128 + number
            name = signal_name(number)
            self._verdict = Verdict(None, 128 + number, (f"poprun was told to end by {name}, so all ended",))
            self._show_withheld()
            self._members.tell(wire.pack_number(wire.SIGNAL, number))
            self._members.ask()  # for how long it may take them
            self._interrupted_at_s = time.monotonic()
            self._deadline_s = self._interrupted_at_s + INTERRUPT_GRACE_S
            self._next_look_s = _NEVER
        elif self._phase is Phase.INTERRUPTED:
            self._close(time.monotonic())

    def _keep_interrupt_deadline(self, now_s: float) -> None:
        """After SIGTERM, wait for as long as the programs need to save; not for the rest once one has ended."""
        facts = self._members.facts
        ends = [each.ending for each in facts if each.ending is not None and not each.is_given_up]
        if any(ending.at_s >= self._interrupted_at_s for ending in ends):
            self._deadline_s = min(self._deadline_s, now_s + INTERRUPT_GRACE_S)
        elif self._exit_status == 128 + signal.SIGTERM:
            grace_s = max([INTERRUPT_GRACE_S, *(each.record.grace_s for each in facts)])
            self._deadline_s = self._interrupted_at_s + grace_s

    def _close(self, now_s: float) -> None:
        self._phase = Phase.CLOSING
        self._members.tell(wire.pack(wire.STOP))
        self._deadline_s = now_s + CLOSE_LIMIT_S
        self._next_look_s = _NEVER

    def _see_off(self, now_s: float) -> None:
        if self._mpirun.status is not None and not any(member.index >= 0 for member in self._connections):
            self._phase = Phase.OVER
        elif now_s >= self._deadline_s:
            number = next(self._last_resort, None)
            if number is None:
                self._phase = Phase.OVER
            else:
                self._mpirun.send(number)
                self._deadline_s = now_s + MPIRUN_LIMIT_S

    # The end.

    def _sweep(self, environ: Mapping[str, str]) -> None:
        """Leave nothing on other hosts, where mpirun may have."""
        is_broken = self._verdict is not None and self._verdict.is_unexplained
        if self._across.others and (is_broken or self._mpirun.status is None or self._mpirun.status > 128):
            from poprun.sweep import sweep

            job = f"prterun-{os.uname().nodename}-{self._mpirun.pid}@"
            silent = {each.host for each in self._members.facts if each.ending is not None and each.ending.fault}
            sweep(self._across.others, silent, self._across.ssh, job, dict(environ))

    def _finish(self) -> None:
        _end_all(descendants(os.getpid()))
        self._mpirun.read_rest()
        verdict = self._verdict
        if verdict is not None and verdict.instance is not None:
            self._output.show_hidden_errors(verdict.instance)
        if verdict is not None and verdict.is_unexplained:
            self._output.show_own(2, self._mpirun.complaint)
        if verdict is not None:
            obstacle = [self._survival.obstacle] if self._survival.obstacle else []
            for line in (*verdict.lines[: MOST_LINES - len(obstacle)], *obstacle):
                self._say(Level.ERROR, line)
        losses = self._survival.losses
        if losses and not self._exit_status:
            self._say(Level.WARN, f"the job completed without {count(len(losses), 'instance')}: {'; '.join(losses)}")
        for number in _INTERRUPTS:  # from here on nothing but a slow reader can keep us
            signal.signal(number, signal.SIG_DFL)

    def _say(self, level: Level, text: str) -> None:
        if level <= self._log.level:
            self._output.show_own(2, format_line(level, text).encode(errors="surrogateescape"))


def _end_all(pids: Sequence[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)
