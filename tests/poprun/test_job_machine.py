"""The decisions of poprun about a job, on a fake clock: the rows of failure_table.md.

Real processes are in tests/jobs/test_poprun_*.py: one job for each mechanism of the operating system.
"""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest
from job_scripts import (
    ANSWER_S,
    ASK,
    BEGIN_S,
    CLOSED,
    EXAMINE,
    ORPHANED,
    PASS_ON,
    RELEASE,
    SEND_TO_MPIRUN,
    SHOW_COMPLAINT,
    SHOW_HIDDEN_ERRORS,
    STOP,
    STOP_LISTENING,
    TOLD,
    Script,
    exited,
    inside,
    is_over,
    joining,
    killed,
    kind_of,
    leaving,
    running,
)

from poprun.cli.log import Level
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
    TOLD_LIMIT_S,
    AgentOrder,
    CleanUp,
    Deed,
    Finish,
    InstanceChanged,
    InstanceEnded,
    MemberConnected,
    OutputPiece,
    Say,
    Tick,
)
from poprun.supervisor.members import MOST_QUESTIONS

SOON_S = 1.0
"""The time limit of failure_table.md for the end of a job after most failures."""


def at(seconds: float) -> pytest.approx:
    return pytest.approx(seconds, abs=1e-6)


def training(count: int = 2, **more) -> Script:
    """Return a script of instances that have joined and compute; the last one fails."""
    script = Script(count, **more)
    for each in script.instances:
        each.record = running()
    script.at(0.1, OutputPiece(0, 1, b"begins\n"))
    return script


def waiting_for(victim: int, count: int = 2, since_s: float = 0.5, **more) -> Script:
    """Return a script that lets all instances except the victim wait for it in a collective."""
    script = training(count, **more)
    for index in range(count):
        if index != victim:
            script.note(since_s, index, inside(victim, since_s=since_s))
    return script


class TestAJobThatSucceeds:
    def test_the_job_ends_when_all_have_ended_with_0_and_nothing_is_left(self):
        script = training(3)
        for index in range(3):
            script.end(2.0 + index, index, exited())
        script.run()
        assert (script.exit_status, script.ended.verdict, script.ended.was_told) == (0, None, False)
        assert script.closed_s == at(4.0)
        assert script.over_s == at(4.0 + 2 * ANSWER_S)
        assert script.all_of(Say) == []
        assert [action for _, action in script.done[-2:]] == [CleanUp(sweeps=False), Finish(script.ended)]

    def test_nobody_is_admitted_once_all_instances_have_connected(self):
        script = Script(2, connected=1)
        assert script.all_of(STOP_LISTENING) == []
        script.at(1.0, MemberConnected(1, 101, "node0"))
        script.run(until_s=1.5)
        assert script.times_of(STOP_LISTENING) == [at(1.0)]

    def test_all_instances_are_asked_for_their_progress_five_times_a_second(self):
        script = training(2)
        script.run(until_s=1.1)
        assert LOOK_S == 0.2
        assert script.times_of(ASK) == [at(each) for each in (0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0, 1.0)]

    def test_an_instance_may_leave_early_if_nobody_waits_for_it(self):
        script = training(2)
        script.end(1.0, 1, exited())
        script.end(60.0, 0, exited())
        script.run()
        assert (script.exit_status, script.closed_s) == (0, at(60.0))

    def test_output_is_shown_at_once(self):
        script = training(2)
        script.run(until_s=0.5)
        assert script.times_of(OutputPiece) == [at(0.1)]

    def test_remaining_processes_are_waited_for_without_polling(self):
        script = training(2)
        for index in range(2):
            script.at(1.0, InstanceEnded(index, exited(at_s=BEGIN_S + 1.0)))
        script.at(90.0, InstanceChanged(0, CLOSED), InstanceChanged(1, CLOSED))
        script.run(until_s=2.0)
        assert script.machine.deadline_s == float("inf")
        script.run()
        assert (script.exit_status, script.closed_s) == (0, at(90.0))

    def test_unanswered_questions_do_not_delay_the_end(self):
        script = training(2)
        script.instances[0].answers = False
        script.end(1.0, 0, exited())
        script.end(1.0, 1, exited())
        script.run()
        assert script.closed_s == at(1.0)


class TestProgramsThatExitWithTheStatusOfASignal:
    """A process other than poprun has sent the signal, and the programs leave after they have saved."""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    def test_a_job_ends_with_a_warning_if_all_instances_exit_with_a_signal_s_status(self, number):
        script = training(2)
        for instance in range(2):
            script.end(1.0, instance, exited(128 + number))
        script.run()
        assert script.exit_status == 128 + number
        assert script.said() == []
        (said,) = script.said(Level.WARN)
        usual = f"the usual status of a program that ends after {number.name}"
        assert f"ended with exit status {128 + number}, {usual}" in said

    @pytest.mark.parametrize("ending", [exited(1), exited(129), killed(signal.SIGTERM)])
    def test_a_different_ending_is_an_error(self, ending):
        script = training(2)
        for instance in range(2):
            script.end(1.0, instance, ending)
        script.run()
        assert script.said(Level.WARN) == []
        assert script.said()

    def test_an_exit_while_another_instance_waits_is_an_error(self):
        script = training(2)
        script.instances[0].record = inside(1)
        script.end(1.0, 1, exited(143))
        script.run()
        assert script.said(Level.WARN) == []
        assert len(script.said()) == 2


FAILURES = {
    "SIGKILL": (killed(signal.SIGKILL), 137, "was killed by SIGKILL in step 3, after collective 4, barrier"),
    "SIGSEGV": (killed(signal.SIGSEGV), 139, "was killed by SIGSEGV in step 3, after collective 4, barrier"),
    "SIGTERM": (killed(signal.SIGTERM), 143, "was killed by SIGTERM in step 3, after collective 4, barrier"),
    "exception": (exited(1), 1, "ended with exit status 1 in step 3, after collective 4, barrier"),
    "exit 3": (exited(3), 3, "ended with exit status 3 in step 3, after collective 4, barrier"),
    "no memory": (
        killed(signal.SIGKILL, lacked_memory=True),
        137,
        "was killed by SIGKILL for lack of memory in step 3, after collective 4, barrier",
    ),
}


class TestAnInstanceThatFails:
    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize(("ending", "status", "how"), FAILURES.values(), ids=FAILURES)
    def test_the_failed_instance_ends_the_job_and_is_blamed(self, ending, status, how, count):
        script = waiting_for(1, count)
        script.end(2.0, 1, ending)
        script.run()
        assert (script.exit_status, script.verdict.instance, script.ended.was_told) == (status, 1, False)
        others = {2: "instance 0 was", 3: "instances 0, 2 were"}[count]
        assert script.said() == [
            f"instance 1 on host node0 (pid 101) {how}",
            f"{others} in collective 5, all_reduce, step 3, waiting for instance 1",
        ]
        assert script.closed_s == at(2.0 + SETTLE_S)
        assert script.over_s == at(2.0 + SETTLE_S + 2 * ANSWER_S)
        assert script.over_s < 2.0 + SOON_S

    def test_progress_is_asked_before_the_blame_and_errors_are_shown_before_the_verdict(self):
        script = waiting_for(1)
        script.end(2.0, 1, exited(1))
        script.run()
        kinds = [kind_of(action) for at_s, action in script.done if at_s >= 2.0]
        assert kinds == [ASK, STOP, STOP, CleanUp, SHOW_HIDDEN_ERRORS, Say, Say, Finish]  # poprun asks only instance 0
        assert script.all_of(SHOW_HIDDEN_ERRORS) == [Deed(SHOW_HIDDEN_ERRORS, 1)]

    def test_the_exception_of_the_first_cause_is_shown_last(self):
        script = waiting_for(1, 3)
        script.at(1.9, OutputPiece(1, 2, b"Traceback (most recent call last):\n"))
        script.at(1.91, OutputPiece(1, 1, b"no error\n"), OutputPiece(1, 2, b"  File\nImportError: no grain\n"))
        script.at(1.92, OutputPiece(0, 2, b"Traceback (most recent call last):\n  File\nLayoutMismatchError: differ\n"))
        script.end(2.0, 1, exited(1))
        script.run()
        assert script.said()[-1] == "first cause: instance 1 on host node0: ImportError: no grain (exit status 1)"
        assert len(script.said()) == 3

    def test_an_instance_without_a_progress_record_is_blamed(self):
        script = Script(2)
        script.end(1.0, 1, exited(7))
        script.run()
        assert (script.exit_status, script.said()) == (
            7,
            ["instance 1 on host node0 (pid 101) ended with exit status 7"],
        )

    def test_the_wait_for_an_outstanding_answer_is_limited(self):
        script = waiting_for(1)
        script.instances[0].answers = False
        script.end(2.0, 1, killed())
        script.run()
        assert script.closed_s == at(2.0 + SETTLE_LIMIT_S)
        assert script.over_s < 2.0 + SOON_S

    def test_an_instance_is_not_blamed_for_an_earlier_failure_of_another(self):
        """Instance 0 fails in a collective because instance 1 has gone, and its end arrives first."""
        script = waiting_for(1)
        script.end(2.0, 0, exited(1))
        script.end(2.04, 1, exited(3))
        script.run()
        assert (script.exit_status, script.verdict.instance) == (3, 1)

    def test_the_first_of_two_simultaneous_failures_is_blamed(self):
        script = training(3)
        script.end(2.04, 1, killed(signal.SIGSEGV))
        script.end(2.0, 2, killed())
        script.run()
        assert (script.exit_status, script.verdict.instance) == (137, 2)

    def test_a_failure_before_all_have_connected_ends_the_job(self):
        script = Script(3, connected=2)
        script.end(1.0, 0, exited(5))
        script.run()
        assert (script.exit_status, script.verdict.instance) == (5, 0)
        assert script.over_s < 1.0 + SOON_S + CLOSE_LIMIT_S + MPIRUN_LIMIT_S  # mpirun still waits for the third one

    def test_an_instance_that_connects_after_the_failure_is_stopped(self):
        script = Script(2, connected=1)
        script.instances[0].stops = False
        script.end(1.0, 0, exited(5))
        script.at(1.3, MemberConnected(1, 101, "node0"))
        script.run()
        assert script.times_of(STOP) == [at(1.0 + SETTLE_S), at(1.3)]

    def test_the_caller_of_mpi_abort_is_blamed(self):
        """Open MPI tells all agents to stop before the caller has ended."""
        script = training(2)
        script.at(1.0, InstanceChanged(0, TOLD), InstanceChanged(1, TOLD))
        script.end(1.02, 1, exited(5))
        script.end(1.1, 0, killed(told=True))
        script.end_mpirun(1.2, 5)
        script.run()
        assert (script.exit_status, script.verdict.instance) == (5, 1)


class TestAnInstanceThatLeavesTooEarly:
    def test_an_exit_with_0_while_another_waits_is_blamed_after_two_looks(self):
        script = waiting_for(1)
        script.end(2.0, 1, exited())
        script.run()
        assert (script.exit_status, script.verdict.instance) == (1, 1)
        assert script.said() == [
            "instance 1 on host node0 (pid 101) ended with exit status 0 too early: instance 0 still needed it",
            "instance 0 was in collective 5, all_reduce, step 3, waiting for instance 1",
        ]
        assert script.closed_s <= 2.0 + 2 * QUICK_LOOK_S + SETTLE_S + 1e-6
        assert script.over_s < 2.0 + SOON_S

    def test_an_exit_is_not_blamed_for_a_collective_that_ends_between_two_looks(self):
        script = waiting_for(1)
        script.end(2.0, 1, exited())
        script.note(2.005, 0, running(number=5))
        script.end(4.0, 0, exited())
        script.run()
        assert (script.exit_status, script.ended.verdict) == (0, None)

    def leaves(self) -> Script:
        script = training(2)
        script.note(2.0, 1, leaving(since_s=2.0))
        script.note(2.0, 0, inside(1, since_s=2.0))
        return script

    def test_an_instance_in_its_exit_handlers_is_released_and_its_status_is_kept(self):
        script = self.leaves()
        script.instances[1].after_release = (0.3, exited(3))
        script.run()
        assert script.all_of(RELEASE) == [AgentOrder(RELEASE, 1, 2)]
        assert (script.exit_status, script.verdict.instance) == (3, 1)
        assert script.closed_s == at(script.times_of(RELEASE)[0] + 0.3)

    def test_an_instance_in_its_exit_handlers_has_half_a_second_to_heed_the_release(self):
        script = self.leaves()
        script.run()
        assert script.exit_status == 1
        assert script.said()[0].endswith("left the program too early: instance 0 still needed it")
        assert script.closed_s == at(script.times_of(RELEASE)[0] + LEAVE_S)

    def test_an_instance_that_heeds_the_release_has_three_seconds_more(self):
        script = self.leaves()
        script.instances[1].heeds = True
        script.run()
        assert script.closed_s == at(script.times_of(RELEASE)[0] + LEAVE_S + LEAVE_LIMIT_S)


class TestAnInstanceThatIsStuck:
    @pytest.mark.parametrize(
        ("state", "stack", "where"),
        [
            ("T", "", "stopped by a signal or a debugger"),
            (
                "R",
                'Thread 1 (most recent call first):\n  File "train.py", line 31 in forward\n',
                "at train.py, line 31, in forward",
            ),
            ("S", "", "at an unknown place of its program"),
        ],
        ids=["stopped", "looping", "silent"],
    )
    @pytest.mark.parametrize("limit_s", [1.0, 300.0])
    def test_a_stuck_instance_is_examined_after_the_limit_and_blamed(self, state, stack, where, limit_s):
        script = waiting_for(1, stuck_timeout_s=limit_s)
        script.instances[1].state, script.instances[1].stack = state, stack
        script.run()
        assert (script.exit_status, script.verdict.instance) == (124, 1)
        assert script.said() == [
            f"instance 1 on host node0 (pid 101) has made no progress for {limit_s:g} s (--stuck-timeout-s) in step 3, "
            f"after collective 4, barrier: it is {where}",
            "instance 0 was in collective 5, all_reduce, step 3, waiting for instance 1",
        ]
        (examined_s,) = script.times_of(EXAMINE)
        assert 0.5 + limit_s <= examined_s <= 0.5 + limit_s + 2 * LOOK_S
        assert script.closed_s == at(examined_s + ANSWER_S)

    def test_an_examination_without_an_answer_ends_after_its_limit(self):
        script = waiting_for(1, stuck_timeout_s=1.0)
        script.run()
        assert script.closed_s == at(script.times_of(EXAMINE)[0] + EXAMINE_S)
        assert script.said()[0].endswith("it is at an unknown place of its program")

    def test_an_instance_stuck_after_its_last_collective_is_blamed(self):
        script = training(2, stuck_timeout_s=10.0)
        script.instances[1].state = "T"
        script.note(0.5, 0, leaving(since_s=0.5))
        script.run()
        assert script.exit_status == 124
        assert script.said()[-1] == "instance 0 had reached the end of the program"

    def test_no_instance_is_stuck_without_a_limit(self):
        script = waiting_for(1, stuck_timeout_s=0.0)
        script.end(900.0, 1, exited())
        script.note(899.0, 0, running(number=5))
        script.end(901.0, 0, exited())
        script.run()
        assert (script.exit_status, script.over_s) == (0, at(901.0 + 2 * ANSWER_S))

    def test_no_instance_is_stuck_while_output_waits_for_its_reader(self):
        script = waiting_for(1, stuck_timeout_s=5.0)
        script.see(1.0, is_behind=True)
        script.see(50.0, is_behind=False)
        script.run(until_s=54.0)
        assert script.all_of(EXAMINE) == []
        script.run(until_s=56.0)
        assert script.all_of(EXAMINE) == [AgentOrder(EXAMINE, 1)]

    def test_with_shrink_the_stuck_instance_is_stopped_and_the_others_go_on(self):
        script = waiting_for(1, stuck_timeout_s=10.0, least=1)
        script.instances[1].state = "T"
        script.note(12.0, 0, running(number=6, since_s=12.0))
        script.end(40.0, 0, exited())
        script.run()
        assert script.exit_status == 0
        assert script.all_of(STOP)[0] == AgentOrder(STOP, 1)
        assert script.all_of(RELEASE) == [AgentOrder(RELEASE, 0, 1)]
        assert script.said(Level.WARN)[0].endswith(
            "it is stopped by a signal or a debugger; instance 0 goes on without it"
        )


MODES = pytest.mark.parametrize("least", [0, 1], ids=["stop", "shrink"])


class TestTheWholeLifeOfAnInstance:
    """From the start of its program to its end, whether or not others wait for it."""

    LIMIT_S = 20.0

    def starting(self, **more) -> Script:
        """Return a script that lets all instances except the last wait in `popdist.init`."""
        script = Script(3, stuck_timeout_s=self.LIMIT_S, **more)
        for index in (0, 1):
            script.note(2.0, index, joining(since_s=2.0))
        return script

    @MODES
    def test_an_instance_stopped_before_init_is_blamed(self, least):
        script = self.starting(least=least)
        script.instances[2].is_stopped, script.instances[2].state = True, "T"
        script.run()
        assert (script.exit_status, script.verdict.instance) == (124, 2)
        assert script.said()[:2] == [
            "instance 2 on host node0 (pid 102) has made no progress for 20 s (--stuck-timeout-s) before popdist.init: "
            "it is stopped by a signal or a debugger",
            "instances 0-1 were in popdist.init, waiting for instance 2",
        ]
        assert script.closed_s <= self.LIMIT_S + 3 * LOOK_S

    @MODES
    def test_an_instance_blocked_before_init_is_blamed(self, least):
        script = self.starting(least=least)
        script.instances[2].works, script.instances[2].state = False, "D"
        script.run()
        assert (script.exit_status, script.verdict.instance) == (124, 2)
        assert "before popdist.init: it is waiting for a disk or a file server" in script.said()[0]
        assert script.closed_s <= 2.0 + self.LIMIT_S + 3 * LOOK_S

    def test_an_instance_busy_before_init_has_ten_times_the_limit(self):
        script = self.starting()
        script.run(until_s=2.0 + 10 * self.LIMIT_S)
        assert script.all_of(EXAMINE) == []
        script.run()
        assert script.exit_status == 124

    def test_no_instance_is_stuck_if_all_sleep_before_init(self):
        script = Script(2, stuck_timeout_s=self.LIMIT_S)
        for index in range(2):
            script.instances[index].works = False
            script.note(25 * self.LIMIT_S, index, running(since_s=25 * self.LIMIT_S))
            script.end(25 * self.LIMIT_S + 1.0, index, exited())
        script.run()
        assert (script.exit_status, script.closed_s) == (0, at(25 * self.LIMIT_S + 1.0))

    def test_an_instance_that_ends_before_init_has_left_too_early(self):
        script = self.starting()
        script.end(3.0, 2, exited())
        script.run()
        assert (script.exit_status, script.verdict.instance) == (1, 2)
        assert script.said()[0].endswith("ended with exit status 0 too early: instances 0-1 still needed it")
        assert script.over_s < 3.0 + SOON_S

    def alone(self, **more) -> Script:
        """Return a script that ends all instances except the last successfully."""
        script = training(2, stuck_timeout_s=self.LIMIT_S, **more)
        script.end(1.0, 0, exited())
        return script

    @MODES
    def test_a_stopped_last_instance_is_blamed(self, least):
        script = self.alone(least=least)
        script.at(5.0, lambda: setattr(script.instances[1], "is_stopped", True))
        script.instances[1].state = "T"
        script.run()
        assert (script.exit_status, script.verdict.instance) == (124, 1)
        assert 5.0 + self.LIMIT_S <= script.closed_s <= 5.0 + self.LIMIT_S + 3 * LOOK_S

    def test_an_instance_stopped_for_less_than_the_limit_goes_on(self):
        script = self.alone()
        for at_s in (5.0, 30.0):
            script.at(at_s, lambda: setattr(script.instances[1], "is_stopped", True))
            script.at(at_s + self.LIMIT_S - 1, lambda: setattr(script.instances[1], "is_stopped", False))
        script.end(60.0, 1, exited())
        script.run()
        assert (script.exit_status, script.closed_s) == (0, at(60.0))

    def test_the_last_instance_may_compute_or_sleep_for_many_times_the_limit(self):
        script = self.alone()
        script.end(25 * self.LIMIT_S, 1, exited())
        script.run()
        assert (script.exit_status, script.closed_s) == (0, at(25 * self.LIMIT_S))


class TestAHalt:
    LIMIT_S = 20.0

    @MODES
    def test_an_agent_that_does_not_answer_ends_the_job(self, least):
        """The others cannot go on, because no process is left to end its program."""
        script = training(2, stuck_timeout_s=self.LIMIT_S, least=least)
        script.at(5.0, lambda: setattr(script.instances[1], "answers", False))
        script.instances[1].stops = False
        script.run()
        assert (script.exit_status, script.verdict.instance, script.verdict.is_of_hosts) == (124, 1, True)
        assert "supervisor process has not answered for 20 s (--stuck-timeout-s)" in script.said()[0]
        assert 5.0 + self.LIMIT_S - LOOK_S <= script.closed_s <= 5.0 + self.LIMIT_S + 2 * LOOK_S
        assert script.over_s <= script.closed_s + CLOSE_LIMIT_S + 2 * MPIRUN_LIMIT_S + 1e-6

    def test_a_silent_agent_gets_a_limited_number_of_questions(self):
        """Its socket buffer is finite, and poprun would wait for space."""
        script = training(2)
        script.instances[1].answers = False
        script.run(until_s=100.0)
        assert script.all_of(ASK).count(AgentOrder(ASK, 1)) == MOST_QUESTIONS
        assert script.all_of(ASK).count(AgentOrder(ASK, 0)) > 400

    def test_an_agent_that_answers_again_is_asked_again(self):
        script = training(2, stuck_timeout_s=self.LIMIT_S)
        script.instances[1].answers = False
        script.run(until_s=10.0)
        script.instances[1].answers = True
        for _ in range(MOST_QUESTIONS):
            script._answer(1)
        script.run(until_s=100.0)
        assert not is_over(script)
        assert script.all_of(ASK).count(AgentOrder(ASK, 1)) > 400

    def test_no_agent_counts_as_silent_while_output_waits_for_its_reader(self):
        script = training(2, stuck_timeout_s=self.LIMIT_S)
        script.instances[1].answers = False
        script.see(1.0, is_behind=True)
        script.run(until_s=500.0)
        assert not is_over(script)

    @MODES
    def test_a_stopped_mpirun_ends_the_job(self, least):
        script = training(2, stuck_timeout_s=self.LIMIT_S, least=least)
        script.see(5.0, is_mpirun_stopped=True)
        script.run()
        assert (script.exit_status, script.verdict.instance, script.verdict.is_of_hosts) == (124, None, True)
        assert script.said() == ["mpirun was stopped by a signal or a debugger for 20 s (--stuck-timeout-s)"]
        assert 5.0 + self.LIMIT_S - LOOK_S <= script.closed_s <= 5.0 + self.LIMIT_S + 2 * LOOK_S

    def test_an_mpirun_stopped_for_less_than_the_limit_does_no_harm(self):
        script = training(2, stuck_timeout_s=self.LIMIT_S)
        script.see(5.0, is_mpirun_stopped=True)
        script.see(5.0 + self.LIMIT_S - 1, is_mpirun_stopped=False)
        script.run(until_s=500.0)
        assert not is_over(script)

    def test_instances_that_open_mpi_never_connects_end_the_job(self):
        script = Script(2, stuck_timeout_s=self.LIMIT_S)
        for index in range(2):
            script.note(2.0 + index, index, joining(since_s=2.0 + index))
        script.run()
        assert (script.exit_status, script.verdict.instance) == (124, None)
        assert script.said()[0].startswith("instances 0-1 have waited for 20 s (--stuck-timeout-s) in popdist.init")
        assert 3.0 + self.LIMIT_S <= script.closed_s <= 3.0 + self.LIMIT_S + 2 * LOOK_S

    def test_the_wait_for_remaining_processes_of_an_instance_is_limited(self):
        script = training(2, stuck_timeout_s=self.LIMIT_S)
        script.end(1.0, 0, exited())
        script.at(1.0, InstanceEnded(1, exited(at_s=BEGIN_S + 1.0)))
        script.run()
        assert (script.exit_status, script.closed_s) == (0, at(1.0 + self.LIMIT_S))
        (line,) = script.said(Level.WARN)
        assert line.startswith(
            "instance 1 on host node0 (pid 101) has ended, but its supervisor process has not confirmed"
        )

    def test_an_agent_that_alone_is_told_to_stop_is_lost(self):
        """A user has told it; mpirun would tell all agents, and end."""
        script = waiting_for(1)
        script.at(2.0, InstanceChanged(1, TOLD))
        script.end(2.15, 1, killed(told=True))
        script.run()
        assert (script.exit_status, script.verdict.instance) == (137, 1)
        assert "was lost" in script.said()[0]
        assert script.closed_s <= 2.0 + TOLD_LIMIT_S + LOOK_S + SETTLE_S + 1e-6


class TestShrink:
    @pytest.mark.parametrize(("ending", "status", "how"), FAILURES.values(), ids=FAILURES)
    def test_the_others_are_told_at_once_and_complete(self, ending, status, how):
        script = waiting_for(1, 3, least=1)
        script.end(2.0, 1, ending)
        script.end(5.0, 0, exited())
        script.end(6.0, 2, exited())
        script.run()
        assert (script.exit_status, script.ended.verdict) == (0, None)
        assert [action for at_s, action in script.done if at_s == at(2.0)][:3] == [
            AgentOrder(STOP, 1),
            AgentOrder(RELEASE, 0, 1),
            AgentOrder(RELEASE, 2, 1),
        ]
        lost = f"instance 1 on host node0 (pid 101) {how}"
        assert script.said(Level.WARN) == [
            f"{lost}; instances 0, 2 go on without it",
            f"the job completed without 1 instance: {lost}",
        ]
        assert script.closed_s == at(2.0)
        assert script.over_s == at(6.0 + 2 * ANSWER_S)

    def test_losses_one_after_another_are_survived(self):
        script = training(4, least=1)
        for index in (1, 2, 3):
            script.end(float(index), index, killed())
        script.end(9.0, 0, exited())
        script.run()
        assert script.exit_status == 0
        assert script.all_of(RELEASE)[-1] == AgentOrder(RELEASE, 0, 3)
        assert script.said(Level.WARN)[-1].startswith("the job completed without 3 instances: instance 1 on host")

    def test_two_simultaneous_losses_are_survived(self):
        script = training(4, least=1)
        script.end(1.0, 1, killed())
        script.end(1.0, 3, exited(1))
        for index in (0, 2):
            script.end(9.0, index, exited())
        script.run()
        assert script.exit_status == 0
        assert script.all_of(RELEASE) == [AgentOrder(RELEASE, 0, 2), AgentOrder(RELEASE, 2, 2)]

    def test_a_lost_agent_is_survived(self):
        script = training(2, least=1)
        script.lose(1.0, 1)
        script.end(9.0, 0, exited())
        script.run()
        assert script.exit_status == 0
        assert "was lost: its supervisor process was killed or cut off" in script.said(Level.WARN)[0]

    def test_a_lost_instance_with_an_unreachable_agent_does_not_delay_the_end(self):
        """Such an agent may be stopped itself; successful instances may clean up for any time."""
        script = training(2, least=1)
        script.instances[1].stops = False
        script.at(1.0, InstanceEnded(1, killed(at_s=BEGIN_S + 1.0)))
        script.at(2.0, InstanceEnded(0, exited(at_s=BEGIN_S + 2.0)))
        script.at(90.0, InstanceChanged(0, CLOSED))
        script.run()
        assert [at_s for at_s in script.times_of(STOP) if at_s > 1.0] == [at(90.0 + CLOSE_LIMIT_S)] * 2
        assert script.exit_status == 0

    def test_an_instance_that_leaves_too_early_is_given_up(self):
        script = waiting_for(1, least=1)
        script.end(2.0, 1, exited())
        script.note(3.0, 0, running(number=5, since_s=3.0))
        script.end(9.0, 0, exited())
        script.run()
        assert script.exit_status == 0
        assert script.all_of(RELEASE) == [AgentOrder(RELEASE, 0, 1)]
        assert "ended with exit status 0 too early" in script.said(Level.WARN)[0]

    def test_fewer_instances_than_the_minimum_end_the_job(self):
        script = training(3, least=2)
        script.end(1.0, 1, killed())
        script.end(2.0, 2, exited(3))
        script.run()
        assert (script.exit_status, script.verdict.instance) == (3, 2)
        assert script.said()[-1] == "only 1 instance would be left, and --min-instances is 2: the job ends"
        assert script.closed_s == at(1.0)
        assert script.over_s < 2.0 + SOON_S

    def test_a_loss_before_all_have_joined_ends_the_job(self):
        script = Script(2, least=1)
        script.instances[1].record = running()
        script.end(1.0, 1, killed())
        script.run()
        assert script.exit_status == 137
        assert script.said()[-1] == (
            "the others cannot go on: an instance was lost before popdist.init had returned everywhere"
        )

    def test_without_shrink_a_loss_ends_the_job(self):
        script = training(2, least=0)
        script.end(1.0, 1, killed())
        script.run()
        assert (script.exit_status, script.all_of(RELEASE)) == (137, [])

    def test_a_loss_after_the_end_of_mpirun_ends_the_job(self):
        script = training(2, least=1)
        script.end_mpirun(1.0, 0)
        script.end(1.0, 1, killed())
        script.run()
        assert script.exit_status == 137

    def test_the_loss_of_a_host_ends_the_job(self):
        script = training(2, least=1, hosts="node0 node1", others=("node1",))
        script.lose(1.0, 1, fault="Connection timed out")
        script.run()
        assert script.exit_status == 137
        assert script.verdict.is_of_hosts
        assert script.all_of(RELEASE) == []

    def test_held_output_is_shown_when_the_others_go_on(self):
        """The stuck instance is given up in the end; until then the cause was unknown and output was held."""
        script = waiting_for(1, stuck_timeout_s=1.0, least=1)
        script.at(2.0, OutputPiece(0, 1, b"meanwhile\n"))
        script.run(until_s=9.0)
        (examined_s,) = script.times_of(EXAMINE)
        assert examined_s < 2.0
        shown = [(at_s, action.data) for at_s, action in script.done if isinstance(action, OutputPiece)]
        assert shown[1:] == [(at(examined_s + EXAMINE_S), b"meanwhile\n")]


class TestOutputAfterAFailure:
    def shown(self, script: Script) -> list[tuple[int, bytes]]:
        return [(each.instance, each.data) for each in script.all_of(OutputPiece)][1:]

    def fails(self) -> Script:
        script = training(2)
        script.end(1.0, 1, exited(1))
        script.at(1.01, OutputPiece(0, 1, b"other\n"), OutputPiece(1, 2, b"last words\n"))
        return script

    def test_output_is_held_until_the_blame_is_clear_and_then_only_the_culprits_is_shown(self):
        script = self.fails()
        script.run(until_s=1.0 + SETTLE_S - 0.01)
        assert self.shown(script) == []
        script.at(1.0 + SETTLE_S + 0.005, OutputPiece(0, 1, b"more\n"), OutputPiece(1, 2, b"the very last\n"))
        script.run()
        assert self.shown(script) == [(1, b"last words\n"), (1, b"the very last\n")]

    def test_all_output_is_shown_if_the_user_ends_the_job_meanwhile(self):
        script = self.fails()
        script.interrupt(1.02, signal.SIGINT)
        script.run()
        assert self.shown(script) == [(0, b"other\n"), (1, b"last words\n")]


TRACE = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
NESTED = TRACE + b"jax.errors.JaxRuntimeError: INTERNAL: CpuCallback error calling callback: " + TRACE
FILTERED = b"--------------------\nFor simplicity, JAX has removed its internal frames from the traceback.\n"
OF_IMPORT = b"KeyboardInterrupt\nImportError: failed\n\nThe above exception was the direct cause of the following:\n\n"
OF_C = b"terminate called after throwing an instance of 'nanobind::python_error'\n  what():  " + TRACE
HANDLING = b"KeyboardInterrupt\n\nDuring handling of the above exception, another exception occurred:\n\n"
FULL_DISK = TRACE + HANDLING + TRACE + b"OSError: full\n"
OWN = TRACE + b"ValueError: 3\n"
IN_CLEANUP = (
    OWN + b"\nDuring handling of the above exception, another exception occurred:\n\n" + TRACE + b"KeyboardInterrupt\n"
)
AT_EXIT = b"Exception ignored in atexit callback: <function save>\n" + OWN


class TestTracebacksAfterCtrlC:
    def shown(self, pieces: list[bytes], number: int = signal.SIGINT, ends: bool = True) -> bytes:
        """Return what is shown of the pieces that instance 1 writes to standard error after a signal."""
        script = training(2)
        script.interrupt(1.0, number)
        script.at(1.1, *(OutputPiece(1, 2, piece) for piece in pieces))
        if ends:
            script.end(1.2, 1, killed(signal.SIGINT))
        script.run()
        return b"".join(each.data for each in script.all_of(OutputPiece) if each.descriptor == 2)

    @pytest.mark.parametrize(
        "trace",
        [
            TRACE + b"KeyboardInterrupt\n",
            NESTED + b"KeyboardInterrupt: \n" + FILTERED,
            TRACE + OF_IMPORT + TRACE + b"ImportError: failed\n",
            OF_C + b"KeyboardInterrupt: \n",
            b"Exception ignored in: <function f>\n" + TRACE + b"KeyboardInterrupt\n",
        ],
        ids=["plain", "callback", "import", "C++", "ignored"],
    )
    @pytest.mark.parametrize("around", [b"", b"saved step 3\n"])
    @pytest.mark.parametrize("ends", [True, False])
    def test_tracebacks_that_follow_from_the_interrupt_are_not_shown(self, trace, around, ends):
        assert self.shown([around + trace + around], ends=ends) == 2 * around
        assert self.shown([around, *trace.splitlines(keepends=True), around], ends=ends) == 2 * around

    @pytest.mark.parametrize("ends", [True, False])
    @pytest.mark.parametrize("text", [FULL_DISK, TRACE + b"ValueError: 3\n", b"step 4\n", TRACE + b"Other\n" * 99999])
    def test_everything_else_is_shown(self, text, ends):
        assert self.shown([text], ends=ends) == text
        assert self.shown([text[:90], text[90:]], ends=ends) == text

    @pytest.mark.parametrize("ends", [True, False])
    @pytest.mark.parametrize(
        "other", [OWN, AT_EXIT, IN_CLEANUP, b"saved step 3\n"], ids=["own", "exit", "cleanup", "log"]
    )
    def test_an_error_beside_the_interrupt_is_shown(self, other, ends):
        interrupt = TRACE + b"KeyboardInterrupt\n"
        assert self.shown([other, interrupt], ends=ends) == other
        assert self.shown([interrupt, other, interrupt], ends=ends) == other

    def test_a_line_about_the_interrupt_hides_no_traceback_above_it(self):
        text = OWN + b"KeyboardInterrupt was received\n"
        assert self.shown([text]) == text

    def test_other_signals_hide_nothing(self):
        assert self.shown([TRACE + b"KeyboardInterrupt\n"], signal.SIGTERM) == TRACE + b"KeyboardInterrupt\n"


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_ending_signals_are_forwarded_and_the_job_ends_with_its_programs(self, number):
        script = training(2)
        for each in script.instances:
            each.after_signal = (0.5, exited(0))
        script.interrupt(1.0, number)
        script.run()
        assert script.all_of(PASS_ON) == [AgentOrder(PASS_ON, 0, number), AgentOrder(PASS_ON, 1, number)]
        assert (script.exit_status, script.ended.was_told) == (128 + number, True)
        assert script.said() == [f"poprun received {number.name} and ended all instances"]
        assert script.closed_s == at(1.5)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_programs_that_ignore_the_signal_are_ended_after_the_grace_period(self, number):
        script = training(2)
        script.interrupt(1.0, number)
        script.run()
        assert script.closed_s == at(1.0 + INTERRUPT_GRACE_S)
        assert script.over_s < 1.0 + 2.0

    def test_a_second_signal_ends_the_job_at_once(self):
        script = training(2)
        script.interrupt(1.0, signal.SIGINT)
        script.interrupt(1.2, signal.SIGINT)
        script.run()
        assert script.closed_s == at(1.2)
        assert script.exit_status == 130

    def test_a_third_signal_changes_nothing(self):
        script = training(2)
        for each in script.instances:
            each.stops = False
        for at_s in (1.0, 1.2, 1.3):
            script.interrupt(at_s, signal.SIGINT)
        script.run()
        assert script.times_of(STOP) == [at(1.2)] * 2

    def saves(self, grace_s: float = 30.0) -> Script:
        script = training(2)
        for each in script.instances:
            each.record = running(grace_s=grace_s)
        return script

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_programs_get_the_grace_period_that_they_asked_for(self, number):
        script = self.saves()
        script.interrupt(1.0, number)
        script.run()
        assert script.closed_s == at(1.0 + 30.0)

    @pytest.mark.parametrize(("grace_s", "announcements"), [(30.0, 1), (0.0, 0)])
    def test_after_ctrl_c_the_user_learns_of_programs_that_save(self, grace_s, announcements):
        script = self.saves(grace_s)
        script.interrupt(1.0, signal.SIGINT)
        script.run()
        text = "the programs save and leave, within 30 s; press Ctrl-C again to end them at once"
        assert [action.text for action in script.all_of(Say) if action.level is Level.WARN] == [text] * announcements

    @pytest.mark.parametrize(("answer_s", "closed_s"), [(2.5, 31.0), (9.0, 1.0 + GRACE_ANSWER_LIMIT_S)])
    def test_sigterm_waits_for_late_answers_that_ask_for_a_grace_period(self, answer_s, closed_s):
        """On a machine with too few cores, an answer is late right after the program has asked for time."""
        script = self.saves()
        for index, each in enumerate(script.instances):
            each.answers = False
            script.at(answer_s, *[lambda index=index: script._answer(index)] * MOST_QUESTIONS)
        script.interrupt(1.0, signal.SIGTERM)
        script.run()
        assert script.closed_s == at(closed_s)

    def test_a_hangup_gives_only_the_usual_grace_period(self):
        script = self.saves()
        script.interrupt(1.0, signal.SIGHUP)
        script.run()
        assert script.closed_s == at(1.0 + INTERRUPT_GRACE_S)

    def test_the_grace_period_is_shortened_once_an_instance_has_left(self):
        script = self.saves()
        script.instances[0].after_signal = (2.0, exited(0))
        script.interrupt(1.0, signal.SIGTERM)
        script.run()
        assert script.closed_s == at(3.0 + INTERRUPT_GRACE_S)

    def test_an_instance_that_ended_before_the_signal_does_not_shorten_the_grace_period(self):
        script = self.saves()
        script.end(0.5, 0, exited(0))
        script.interrupt(1.0, signal.SIGTERM)
        script.run()
        assert script.closed_s == at(31.0)

    def test_a_second_signal_ends_programs_that_are_saving(self):
        script = self.saves()
        script.interrupt(1.0, signal.SIGTERM)
        script.interrupt(4.0, signal.SIGINT)
        script.run()
        assert (script.closed_s, script.exit_status) == (at(4.0), 143)

    def test_a_signal_during_the_search_for_the_cause_decides_the_end(self):
        script = training(2)
        script.end(1.0, 1, exited(3))
        script.interrupt(1.02, signal.SIGTERM)
        script.run()
        assert (script.exit_status, script.verdict.instance, script.ended.was_told) == (143, None, True)

    def test_a_signal_while_the_job_ends_changes_nothing(self):
        script = training(2)
        for each in script.instances:
            each.stops = False
        script.end(1.0, 1, exited(3))
        script.interrupt(1.0 + SETTLE_S + 0.1, signal.SIGTERM)
        script.run()
        assert (script.exit_status, script.verdict.instance) == (3, 1)
        assert script.all_of(PASS_ON) == []

    def test_instances_that_save_learn_of_a_loss(self):
        """Otherwise they would wait for the lost one in the collective before they save."""
        script = self.saves()
        script = waiting_for(1, 3, least=1)
        for each in script.instances:
            each.record = running(grace_s=30.0)
        script.interrupt(1.0, signal.SIGTERM)
        script.end(2.0, 1, killed())
        for index in (0, 2):
            script.end(2.5, index, exited(0))
        script.run()
        assert [each for each in script.all_of(RELEASE)] == [AgentOrder(RELEASE, 0, 1), AgentOrder(RELEASE, 2, 1)]
        assert script.times_of(RELEASE) == [at(2.0)] * 2
        assert (script.closed_s, script.exit_status) == (at(2.0), 143)
        assert script.over_s == at(2.5 + 2 * ANSWER_S)

    def test_an_instance_ended_by_the_signal_is_not_a_loss(self):
        script = training(2, least=1)
        script.instances[1].after_signal = (0.1, killed(signal.SIGTERM))
        script.interrupt(1.0, signal.SIGTERM)
        script.run()
        assert script.all_of(RELEASE) == []

    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
    def test_user_signals_are_only_forwarded(self, number):
        script = training(2)
        script.interrupt(1.0, number)
        for index in range(2):
            script.end(5.0, index, exited())
        script.run()
        assert script.all_of(PASS_ON) == [AgentOrder(PASS_ON, 0, number), AgentOrder(PASS_ON, 1, number)]
        assert (script.exit_status, script.ended.was_told, script.closed_s) == (0, False, at(5.0))

    def test_an_exit_because_of_a_user_signal_counts_as_told(self):
        script = training(2, least=1)
        for each in script.instances:
            each.after_signal = (0.1, exited(128 + signal.SIGUSR1))
        script.interrupt(1.0, signal.SIGUSR1)
        script.run()
        assert script.all_of(RELEASE) == []
        assert (script.exit_status, script.ended.was_told) == (128 + signal.SIGUSR1, True)


class TestMpirun:
    @pytest.mark.parametrize("status", [0, 1, 137])
    def test_an_end_of_mpirun_before_its_instances_is_a_failure(self, status):
        script = training(2)
        script.end_mpirun(1.0, status)
        script.run()
        assert script.exit_status == (status or 1)
        assert script.verdict.is_of_hosts
        assert script.said() == [
            f"mpirun ended with {status} before every instance had completed",
            "instance 0 on host node0 (pid 100) did not report how it ended",
            "instance 1 on host node0 (pid 101) did not report how it ended",
        ]
        assert script.all_of(SHOW_COMPLAINT) == [Deed(SHOW_COMPLAINT)]
        assert script.closed_s == at(1.0 + SETTLE_S)

    def test_an_early_end_of_mpirun_is_forgiven_if_the_instances_end_well(self):
        script = training(2)
        script.end_mpirun(1.0, 0)
        for index in range(2):
            script.end(1.05, index, exited())
        script.run()
        assert script.closed_s <= 1.0 + SETTLE_S + 1e-6

    def test_the_wait_after_the_end_of_mpirun_is_longer_with_several_hosts(self):
        """Instances on a host without its daemon end with delays."""
        script = training(2, hosts="node0 node1", others=("node1",))
        script.end_mpirun(1.0, 0)
        script.run()
        assert script.closed_s == at(1.0 + LOST_HOST_SETTLE_S)

    def test_an_mpirun_that_starts_nothing_is_ended_after_the_limit(self):
        script = Script(3, connected=1, start_timeout_s=60.0)
        script.run()
        assert script.exit_status == 1
        assert script.said()[:2] == [
            "mpirun did not start every instance in time before every instance had completed",
            "instances 1-2 never started",
        ]
        assert script.closed_s == at(60.0 + SETTLE_S)

    @pytest.mark.parametrize("others", [(), ("node1",)])
    def test_a_firewall_is_suggested_only_for_jobs_on_other_hosts(self, others):
        script = Script(3, connected=1, start_timeout_s=60.0, others=others)
        script.run()
        assert ("firewall" in script.said()[-1]) is bool(others)
        assert ("ip_local_port_range" in script.said()[-1]) is bool(others)

    def test_an_mpirun_that_cannot_start_ends_the_job_at_once(self):
        script = Script(1, connected=0)
        script.end_mpirun(0.1, 213)
        script.run()
        assert (script.exit_status, script.said()[-1]) == (213, "instance 0 never started")
        assert script.over_s == at(0.1 + SETTLE_S + CLOSE_LIMIT_S) or script.over_s == at(0.1 + SETTLE_S)

    def test_the_start_limit_ends_once_all_have_started(self):
        script = Script(2, connected=1, start_timeout_s=5.0)
        script.at(4.0, MemberConnected(1, 101, "node0"))
        script.run(until_s=100.0)
        assert not is_over(script)
        assert script.all_of(STOP) == []

    def test_a_killed_mpirun_is_blamed_for_failures_in_init(self):
        """Its connections close before the agents learn of its end; no single host is to blame."""
        script = Script(2, least=1)
        script.note(0.1, 0, joining(since_s=0.1))
        script.at(1.0, InstanceChanged(0, ORPHANED), InstanceChanged(1, ORPHANED))
        script.end(1.02, 0, exited(14))
        script.end_mpirun(1.03, 137)
        script.run()
        assert (script.exit_status, script.verdict.instance, script.verdict.is_of_hosts) == (137, None, True)
        assert script.said()[0] == "mpirun ended with 137 before every instance had completed"

    def test_the_status_of_a_killed_mpirun_is_awaited(self):
        """On a busy machine it comes after the reports of the agents, which see at once that mpirun is gone."""
        script = Script(2, least=1)
        script.note(0.1, 0, joining(since_s=0.1))
        script.note(0.1, 1, joining(since_s=0.1))
        script.at(1.0, InstanceChanged(0, ORPHANED), InstanceChanged(1, ORPHANED))
        script.end(1.02, 0, exited(14))
        script.end(1.03, 1, exited(14))
        script.end_mpirun(1.03 + 3 * SETTLE_S, 137)
        script.run()
        assert (script.exit_status, script.said()[0]) == (
            137,
            "mpirun ended with 137 before every instance had completed",
        )

    def test_an_instance_that_never_started_is_named_if_mpirun_kills_the_others(self):
        script = Script(2, connected=1)
        script.at(1.0, InstanceChanged(0, TOLD))
        script.lose(1.1, 0)
        script.end_mpirun(1.2, 137)
        script.run()
        assert (script.exit_status, script.verdict.instance) == (137, None)
        assert script.said()[1] == "instance 1 never started"

    def test_an_mpirun_that_does_not_end_is_told_and_then_killed(self):
        script = training(2)
        script.hold_mpirun()
        for index in range(2):
            script.end(1.0, index, exited())
        script.mpirun_heeds[1] = False
        script.run()
        assert script.all_of(SEND_TO_MPIRUN) == [
            Deed(SEND_TO_MPIRUN, signal.SIGHUP),
            Deed(SEND_TO_MPIRUN, signal.SIGKILL),
        ]
        told_s = 1.0 + CLOSE_LIMIT_S
        assert script.times_of(SEND_TO_MPIRUN) == [at(told_s), at(told_s + MPIRUN_LIMIT_S)]
        assert script.over_s == at(told_s + MPIRUN_LIMIT_S + ANSWER_S)
        assert script.exit_status == 0

    def test_an_mpirun_that_survives_sigkill_is_left_alone(self):
        script = training(2)
        script.hold_mpirun()
        for index in range(2):
            script.end(1.0, index, exited())
        script.mpirun_heeds = {1: False, 9: False}
        script.run()
        assert script.over_s == at(1.0 + CLOSE_LIMIT_S + 2 * MPIRUN_LIMIT_S)

    def test_the_wait_for_agents_that_do_not_end_is_limited(self):
        script = training(2)
        for each in script.instances:
            each.stops = False
        script.end(1.0, 1, killed())
        script.run()
        closed_s = 1.0 + SETTLE_S
        assert script.times_of(SEND_TO_MPIRUN) == [
            at(closed_s + CLOSE_LIMIT_S),
            at(closed_s + CLOSE_LIMIT_S + MPIRUN_LIMIT_S),
        ]
        assert script.over_s == at(closed_s + CLOSE_LIMIT_S + 2 * MPIRUN_LIMIT_S)
        assert script.exit_status == 137


class TestHosts:
    HOSTS = "node0 h1 h1"

    def test_a_killed_or_disconnected_agent_is_a_lost_instance(self):
        script = training(2)
        script.lose(1.0, 1)
        script.run()
        assert script.exit_status == 137
        assert script.said() == [
            "instance 1 on host node0 (pid 101) was lost: its supervisor process was killed or cut off; "
            "last heard of in step 3, after collective 4, barrier"
        ]
        assert script.over_s < 1.0 + SOON_S

    def test_a_broken_link_is_named_with_its_host(self):
        script = training(3, hosts=self.HOSTS, others=("h1",))
        script.lose(1.0, 1, 2, fault="Connection timed out")
        script.run()
        assert script.exit_status == 137
        assert script.said()[0].startswith(
            "instance 1 on host h1 (pid 101) was lost: the connection to its host broke (Connection timed out)"
        )
        assert script.verdict.is_of_hosts

    def test_a_lost_daemon_is_named_with_its_host_and_instances(self):
        script = training(3, hosts=self.HOSTS, others=("h1",))
        script.at(1.0, InstanceChanged(1, ORPHANED), InstanceChanged(2, ORPHANED))
        for index in (1, 2):
            script.end(1.1, index, killed(told=True))
        script.end_mpirun(1.15, 0)
        script.run()
        assert script.exit_status == 1
        assert script.said()[0] == "host h1 has lost its daemon of Open MPI, and with it instances 1-2"
        assert script.over_s < 1.0 + 2.0

    def test_a_job_ended_by_a_batch_system_blames_no_instance(self):
        """SIGTERM reaches agents and programs alike."""
        script = training(3, hosts=self.HOSTS, others=("h1",))
        script.at(1.0, InstanceChanged(1, TOLD), InstanceChanged(2, TOLD))
        for index in (1, 2):
            script.end(1.001, index, killed(signal.SIGTERM, told=True))
        script.end_mpirun(1.1, 143)
        script.run()
        assert script.exit_status == 143
        assert script.verdict.instance is None
        assert script.said()[0] == "mpirun ended with 143 before every instance had completed"
        assert "instances 1-2 on host h1 had to stop because SIGTERM came to all processes there" in script.said()[-1]

    @pytest.mark.parametrize(("status", "sweeps"), [(0, True), (1, True), (137, True)])
    def test_hosts_are_swept_if_mpirun_ended_too_early(self, status, sweeps):
        script = training(3, hosts=self.HOSTS, others=("h1",))
        script.end_mpirun(1.0, status)
        script.run()
        assert script.all_of(CleanUp) == [CleanUp(sweeps)]

    def test_hosts_are_not_swept_if_mpirun_ended_by_itself(self):
        script = training(3, hosts=self.HOSTS, others=("h1",))
        script.end(1.0, 1, exited(3))
        script.run()
        assert script.all_of(CleanUp) == [CleanUp(sweeps=False)]

    def test_hosts_are_swept_if_mpirun_was_killed_and_silent_hosts_are_known(self):
        script = training(3, hosts=self.HOSTS, others=("h1",))
        script.hold_mpirun()
        script.lose(1.0, 1, 2, fault="Connection timed out")
        script.run()
        assert script.all_of(CleanUp) == [CleanUp(sweeps=True, silent=frozenset({"h1"}))]


class TestStandardOutput:
    def test_a_closed_reader_ends_the_job_silently(self):
        script = training(2)
        script.see(1.0, closed="")
        script.run()
        assert (script.exit_status, script.ended.was_told, script.said()) == (141, True, [])
        assert script.closed_s == at(1.0)

    def test_a_failed_write_ends_the_job_with_the_reason(self):
        script = training(2)
        script.see(1.0, closed="No space left on device")
        script.run()
        assert script.exit_status == 141
        assert script.said() == [
            "standard output cannot be written: No space left on device; "
            "the job ends because nobody could see its output"
        ]

    def test_a_closed_reader_after_the_end_of_all_programs_does_no_harm(self):
        script = training(2)
        for index in range(2):
            script.end(1.0, index, exited(0))
        script.see(1.0 + ANSWER_S / 2, closed="")
        script.run()
        assert script.exit_status == 0


class TestRandomScripts:
    """Random scripts: `--seed N`; more of them in the complete tier."""

    LIMIT_S = 2 * SETTLE_LIMIT_S + LEAVE_S + LEAVE_LIMIT_S + EXAMINE_S + CLOSE_LIMIT_S + 2 * MPIRUN_LIMIT_S
    STUCK_S = 20.0

    def test_a_job_ends_once_and_in_time(self, seed):
        for number in range(200):
            self.check(f"{seed} {number}")

    @pytest.mark.complete
    def test_many_more_jobs_end_once_and_in_time(self, seed):
        for number in range(200, 2_000):
            self.check(f"{seed} {number}")

    def check(self, seed: str) -> None:
        script = self.draw(random.Random(seed))
        script.run()
        assert len(script.all_of(Finish)) == len(script.all_of(CleanUp)) == 1, seed
        last_s = 30.0 + self.STUCK_S + 30.0  # events, a stuck instance, the time to save
        assert script.over_s < last_s + 4 * self.LIMIT_S, seed
        assert 0 <= script.exit_status < 256, seed
        ended = script.ended
        assert (ended.exit_status == 0) == (ended.verdict is None) or ended.exit_status == 141, seed
        assert 0 < len(script.said()) <= 15 or ended.exit_status in (0, 141), seed
        released = [each.number for each in script.all_of(RELEASE)]
        assert released == sorted(released) or len(script.instances) in released, seed
        assert {each.instance for each in script.all_of(OutputPiece)} <= set(range(len(script.instances))), seed

    def draw(self, generator: random.Random) -> Script:
        count = generator.choice([1, 2, 3, 5])
        connected = generator.choice([count, count, count, count - 1])
        across = {"least": generator.choice([0, 0, 1, 2]), "stuck_timeout_s": generator.choice([0.0, self.STUCK_S])}
        if across["least"]:
            across["spares"] = generator.randrange(count)
            across["reserves"] = generator.randrange(across["spares"] + 1)
            across["most_new"] = generator.choice([0, 2])
        script = Script(count, connected=connected, start_timeout_s=30.0, **across)
        for each in script.instances:
            each.record = generator.choice([running(), inside(0), leaving(), running(grace_s=30.0), each.record])
            each.record = replace(each.record, is_ready=generator.random() < 0.5)
            each.answers = generator.random() < 0.9
            each.stops = generator.random() < 0.9
            each.heeds = generator.random() < 0.5
            each.is_stopped = generator.random() < 0.1
            each.works = generator.random() < 0.9
            each.state = generator.choice(["", "T", "S"])
            each.after_signal = (generator.uniform(0, 3), generator.choice([None, exited(0), killed(15)]))
            each.after_release = (generator.uniform(0, 3), generator.choice([None, exited(0), exited(2)]))
        for index in range(connected):
            for _ in range(generator.randrange(3)):
                record = generator.choice([running(5), inside(generator.randrange(count)), leaving()])
                script.note(generator.uniform(0, 30), index, record)
            script.at(generator.uniform(0, 30), OutputPiece(index, generator.choice([1, 2]), b"words\n"))
            script.end(generator.uniform(1, 30), index, generator.choice([exited(0), exited(0), exited(1), killed()]))
        if generator.random() < 0.2:
            script.lose(generator.uniform(1, 30), generator.randrange(max(connected, 1)))
        if generator.random() < 0.2:
            script.end_mpirun(generator.uniform(1, 30), generator.choice([0, 1, 137]))
        for _ in range(generator.choice([0, 0, 0, 1, 2])):
            script.interrupt(generator.uniform(1, 30), generator.choice([2, 15, 1, 10]))
        if generator.random() < 0.05:
            script.see(generator.uniform(1, 30), closed="")
        if generator.random() < 0.1:
            script.see(generator.uniform(1, 30), is_mpirun_stopped=True)
        script.mpirun_heeds = {1: generator.random() < 0.8, 9: True}
        return script


def test_a_tick_before_its_time_changes_nothing():
    script = training(2)
    script.run(until_s=0.55)
    deadline_s = script.machine.deadline_s
    assert deadline_s == at(BEGIN_S + 0.6)
    assert script.machine.advance(Tick(), BEGIN_S + 0.56) == []
    assert script.machine.deadline_s == deadline_s
