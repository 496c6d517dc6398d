"""The decisions of an agent about its instance, on a fake clock."""

from __future__ import annotations

import ast
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import poprun.agent.guard_machine
from poprun.agent.guard_machine import (
    ABORT_GRACE_S,
    CUT_SIGNAL,
    LINGER_S,
    PASSED_ON,
    STACK_LIMIT_S,
    STACK_S,
    STACK_SIGNAL,
    STOPPING,
    SWEEP_S,
    Action,
    Do,
    GuardMachine,
)
from poprun.ipc import wire

KILL = (Do.SEND, signal.SIGKILL)
SWEEP = (Do.SWEEP, 0)
LOOK = (Do.LOOK_AT_STACK, 0)
NEVER = float("inf")


class Instance:
    """A machine on a fake clock; records the actions and their times."""

    def __init__(self) -> None:
        self.machine = GuardMachine()
        self.now_s = 100.0
        self.done: list[tuple[float, Action]] = []

    def do(self, actions: list[Action]) -> list[Action]:
        self.done += [(self.now_s, action) for action in actions]
        return actions

    def pass_time(self, seconds: float) -> list[Action]:
        """Let time pass with a tick whenever one is due, and return the actions."""
        before, end_s = len(self.done), self.now_s + seconds
        while self.machine.deadline_s <= end_s:
            self.now_s = max(self.now_s, self.machine.deadline_s)
            self.do(self.machine.tick(self.now_s))
        self.now_s = end_s
        self.do(self.machine.tick(self.now_s))
        return [action for _, action in self.done[before:]]

    def end(self, code: int) -> list[Action]:
        return self.do(self.machine.note_end(code, self.now_s))


@pytest.fixture
def instance() -> Instance:
    return Instance()


class TestAProgramThatEnds:
    @pytest.mark.parametrize("code", [0, 3, -9])
    def test_output_and_record_are_sent_before_the_end(self, instance, code):
        assert instance.end(code) == [(Do.DRAIN, 0), (Do.REPORT, 0), (Do.TELL_ENDED, code)]
        assert instance.machine.note_none_left() == [(Do.DRAIN, 0), (Do.TELL_CLOSED, 0)]

    def test_descendants_have_a_grace_period_and_are_then_killed_repeatedly(self, instance):
        """A process that is being killed may start another one."""
        instance.end(0)
        assert instance.pass_time(LINGER_S - 0.001) == []
        assert instance.machine.deadline_s == pytest.approx(100.0 + LINGER_S)
        assert instance.pass_time(0.001 + 3.5 * SWEEP_S) == [SWEEP] * 4
        instance.machine.note_none_left()
        assert instance.pass_time(10.0) == []
        assert instance.machine.deadline_s == NEVER

    def test_the_agent_waits_for_poprun_to_dismiss_it(self, instance):
        instance.end(0)
        instance.machine.note_none_left()
        assert not instance.machine.is_over
        instance.machine.dismiss()
        assert instance.machine.is_over

    def test_the_agent_waits_for_the_last_descendant(self, instance):
        instance.end(0)
        instance.machine.dismiss()
        assert not instance.machine.is_over
        assert instance.machine.has_children
        assert instance.pass_time(0.0)[0] == SWEEP  # no grace period any more
        instance.machine.note_none_left()
        assert instance.machine.is_over


class TestAnOrderToStop:
    @pytest.mark.parametrize("number", STOPPING)
    def test_the_agent_reports_it_and_gives_the_program_a_grace_period(self, instance, number):
        assert instance.machine.take_signal(number, instance.now_s) == [(Do.TELL_TOLD, number)]
        assert instance.machine.told == number
        assert instance.pass_time(ABORT_GRACE_S - 0.001) == []
        assert instance.pass_time(0.001) == [KILL]
        assert instance.pass_time(10.0) == []  # once is enough

    def test_only_the_first_order_counts(self, instance):
        instance.machine.take_signal(signal.SIGTERM, instance.now_s)
        instance.pass_time(0.1)
        assert instance.machine.take_signal(wire.ORPHANED, instance.now_s) == []
        assert instance.machine.told == signal.SIGTERM
        assert instance.pass_time(ABORT_GRACE_S - 0.1 + 0.001) == [KILL]

    def test_a_program_that_has_ended_by_itself_is_not_killed(self, instance):
        instance.machine.take_signal(signal.SIGTERM, instance.now_s)
        instance.pass_time(0.1)
        instance.end(5)
        assert KILL not in instance.pass_time(1.0)

    def test_an_order_of_poprun_kills_at_once(self, instance):
        instance.machine.dismiss()
        assert instance.machine.told == signal.SIGKILL
        assert instance.machine.deadline_s <= instance.now_s
        assert instance.pass_time(0.0) == [KILL]
        instance.end(-9)
        assert SWEEP in instance.pass_time(LINGER_S)

    def test_an_earlier_order_of_mpirun_remains_the_reason(self, instance):
        instance.machine.take_signal(signal.SIGHUP, instance.now_s)
        instance.machine.dismiss()
        assert instance.machine.told == signal.SIGHUP
        assert instance.pass_time(0.0) == [KILL]


class TestSignalsForTheProgram:
    @pytest.mark.parametrize("number", PASSED_ON)
    def test_signals_are_forwarded_with_sigstop_in_place_of_sigtstp(self, instance, number):
        passed_on = signal.SIGSTOP if number == signal.SIGTSTP else number
        assert instance.machine.take_signal(number, instance.now_s) == [(Do.SEND, passed_on)]
        assert instance.machine.pass_on(number) == [(Do.SEND, passed_on)]
        assert instance.machine.told == 0

    def test_signals_reach_no_other_process_after_the_program_has_ended(self, instance):
        instance.end(0)
        assert instance.machine.take_signal(signal.SIGUSR1, instance.now_s) == []
        assert instance.machine.pass_on(signal.SIGTERM) == []

    def test_a_notice_for_the_host_is_told_to_poprun_and_does_not_reach_the_program(self, instance):
        machine = GuardMachine(tells_notice=True)
        assert machine.take_signal(signal.SIGUSR1, instance.now_s) == [(Do.TELL_NOTICE, 0)]
        assert machine.take_signal(signal.SIGUSR2, instance.now_s) == [(Do.SEND, signal.SIGUSR2)]
        assert machine.pass_on(signal.SIGUSR1) == [(Do.SEND, signal.SIGUSR1)]

    def test_signals_for_the_agent_are_not_forwarded(self, instance):
        assert instance.machine.take_signal(signal.SIGCHLD, instance.now_s) == []

    def test_the_signal_of_an_injected_fault_breaks_the_connection(self, instance):
        assert instance.machine.take_signal(CUT_SIGNAL, instance.now_s) == [(Do.CUT, 0)]


class TestTheStackOfTheProgram:
    def ask(self, instance: Instance, stack_bytes: int) -> None:
        asked = instance.machine.examine(stack_bytes, instance.now_s)
        assert asked == ([(Do.SEND, STACK_SIGNAL)] if stack_bytes else [])
        assert instance.pass_time(STACK_S - 0.001) == []
        assert instance.pass_time(0.001) == [LOOK]

    def see(self, instance: Instance, stack_bytes: int, is_stopped: bool = False) -> list[Action]:
        return instance.do(instance.machine.see_stack(stack_bytes, is_stopped, instance.now_s))

    def test_the_stack_is_sent_when_it_stops_growing(self, instance):
        self.ask(instance, 10)
        assert self.see(instance, 10) == []
        assert instance.pass_time(STACK_S) == [LOOK]
        assert self.see(instance, 500) == []
        assert instance.pass_time(STACK_S) == [LOOK]
        assert self.see(instance, 900) == []
        assert instance.pass_time(STACK_S) == [LOOK]
        assert self.see(instance, 900) == [(Do.TELL_STACK, 10)]
        assert instance.pass_time(10.0) == []

    def test_the_wait_for_the_stack_is_limited(self, instance):
        self.ask(instance, 10)
        began_s = instance.now_s - STACK_S
        while self.see(instance, 10) == []:
            assert instance.pass_time(STACK_S) == [LOOK]
        assert began_s + STACK_LIMIT_S <= instance.now_s < began_s + STACK_LIMIT_S + 2 * STACK_S

    def test_a_program_without_a_stack_file_gets_no_signal(self, instance):
        """The signal would end the program."""
        self.ask(instance, 0)
        assert self.see(instance, 0) == [(Do.TELL_STACK, -1)]

    def test_a_stopped_program_is_not_waited_for(self, instance):
        self.ask(instance, 10)
        assert self.see(instance, 10, is_stopped=True) == [(Do.TELL_STACK, 10)]

    def test_a_program_that_has_ended_is_not_waited_for(self, instance):
        instance.machine.examine(10, instance.now_s)
        instance.end(1)
        instance.pass_time(STACK_S)
        assert self.see(instance, 10) == [(Do.TELL_STACK, 10)]

    def test_an_ended_program_is_not_examined(self, instance):
        instance.end(1)
        assert instance.machine.examine(10, instance.now_s) == []


def test_the_machine_is_over_soon_after_its_dismissal_in_any_order_of_events(seed):
    """Random scripts contain signals, questions, the end of the program and the dismissal in any order."""
    for number in range(500):
        generator, instance = random.Random(f"{seed} {number}"), Instance()
        is_running, dismissed_s = True, NEVER
        for _ in range(generator.randrange(1, 12)):
            deed = generator.randrange(5)
            if deed == 0:
                signals = (*STOPPING, *PASSED_ON, CUT_SIGNAL)
                instance.do(instance.machine.take_signal(generator.choice(signals), instance.now_s))
            elif deed == 1:
                instance.do(instance.machine.examine(generator.choice([0, 10]), instance.now_s))
            elif deed == 2 and is_running:
                is_running = False
                instance.end(generator.choice([0, 1, -9]))
            elif deed == 3:
                instance.machine.dismiss()
                dismissed_s = min(dismissed_s, instance.now_s)
            for action in instance.pass_time(generator.uniform(0, 0.3)):
                if action == KILL and is_running:
                    is_running = False
                    instance.end(-9)
                elif action == LOOK:
                    instance.do(instance.machine.see_stack(10, False, instance.now_s))
        instance.machine.dismiss()
        if is_running:
            assert KILL in instance.pass_time(0.0), number
            instance.end(-9)
        assert SWEEP in instance.pass_time(LINGER_S), number
        instance.do(instance.machine.note_none_left())
        assert instance.machine.is_over, number
        kinds = [what for _, (what, _) in instance.done]
        assert kinds.count(Do.TELL_ENDED) == kinds.count(Do.TELL_CLOSED) == 1, number
        assert kinds.count(Do.TELL_TOLD) <= 1, number


PURE = ("diagnosis", "job_events", "job_machine", "lookout", "members")


class TestLoadTime:
    """The agent starts before each program."""

    SLOW = {"dataclasses", "typing", "inspect", "subprocess", "json", "asyncio", "logging", "pathlib", "threading"}

    def test_the_agent_imports_no_slow_module(self):
        program = (
            "import sys; before = set(sys.modules); "
            "import poprun.agent.guard; print(*sorted(set(sys.modules) - before))"
        )
        words = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {ROOT!r}); {program}"]
        loaded = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        assert not self.SLOW & set(loaded)

    @pytest.mark.parametrize(
        "name",
        ["agent/guard_machine", *(f"supervisor/{name}" for name in PURE)],
    )
    def test_a_machine_imports_no_clock_and_no_process_module(self, name):
        tree = ast.parse(Path(ROOT, "poprun", f"{name}.py").read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not imported & {"time", "os", "socket", "select", "threading", "subprocess"}


ROOT = str(Path(poprun.agent.guard_machine.__file__).parents[2])
