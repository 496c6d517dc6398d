"""Whom a failure is put down to, where more than one instance could be meant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from popdist.records.progress import ProgressRecord, State
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.supervisor.diagnosis import find_stuck, first_cause, judge, judge_missing, vain_waits

HERE = "node0"
UNUSED = ProgressRecord()


def exited(status: int, at_s: float = 10.0, told: bool = False) -> Ending:
    return Ending(EndKind.EXIT, status, at_s, told)


def killed(number: int = 9, at_s: float = 10.0) -> Ending:
    return Ending(EndKind.SIGNAL, number, at_s)


def in_state(state: State, *waiting_for: int, number: int = 5, since_s: float = 1.0) -> ProgressRecord:
    return ProgressRecord(3, number, "barrier", state, since_s, waiting_for)


def inside(*waiting_for: int, number: int = 5) -> ProgressRecord:
    return in_state(State.IN_COLLECTIVE, *waiting_for, number=number)


def running(number: int = 4, since_s: float = 1.0) -> ProgressRecord:
    return in_state(State.RUNNING, number=number, since_s=since_s)


def leaving(number: int = 4) -> ProgressRecord:
    return in_state(State.LEAVING, number=number)


def job(*instances: tuple[Ending | None, ProgressRecord]) -> list[Facts]:
    return [
        Facts(index, f"node{index}", 100 + index, ending, record) for index, (ending, record) in enumerate(instances)
    ]


class TestWhoFailedInACollective:
    def test_is_to_blame_itself_when_all_had_come_to_it(self) -> None:
        assert first_cause(job((exited(1), inside()), (exited(0), running(number=5)))) == 0

    def test_did_not_wait_for_a_program_that_keeps_no_record(self) -> None:
        assert first_cause(job((exited(1), inside()), (exited(0), UNUSED))) == 0

    def test_passes_the_blame_on_through_one_that_was_leaving_and_waited_too(self) -> None:
        between = in_state(State.LEAVING_INSIDE, 2)
        assert first_cause(job((exited(1), inside(1)), (None, between), (killed(at_s=10.2), running()))) == 2

    def test_blames_the_one_of_several_that_went_first(self) -> None:
        facts = job(
            (exited(1), inside(1, 2)), (exited(0, 9.0), running(since_s=5.0)), (exited(0, 8.0), running(since_s=6.0))
        )
        assert first_cause(facts) == 2


def test_one_that_was_given_up_before_is_not_the_one_that_ended_by_itself() -> None:
    facts = job((exited(3, at_s=5.0), running()), (exited(14, told=True), running()))
    facts[0] = replace(facts[0], is_given_up=True)
    assert first_cause(facts) == 1


def test_an_exit_status_of_15_is_no_sigterm() -> None:
    facts = job((exited(15), running()), (None, running()))
    facts[0] = replace(facts[0], told_at_s=9.0)
    verdict = judge(facts, HERE)
    assert verdict is not None
    assert (verdict.instance, verdict.exit_status) == (0, 15)


def test_only_those_are_named_that_still_needed_the_one_that_left() -> None:
    facts = job(
        (exited(0), leaving()),
        (None, inside(0)),
        (None, inside()),  # its wait is too short to be noted, and instance 0 has not come
        (None, running()),
        (None, inside(1)),
        (None, inside(number=4)),  # instance 0 has come to that one
        (None, in_state(State.RUNNING, 0)),  # what it waited for before
    )
    verdict = judge(facts, HERE, vain_waits(facts))
    assert verdict is not None
    assert verdict.lines[0].endswith("ended with exit status 0 too early: instances 1-2 still needed it")


def test_before_the_first_collective_the_step_is_all_there_is_to_say() -> None:
    verdict = judge(job((exited(1), ProgressRecord(3, 0, "", State.RUNNING, 1.0))), HERE)
    assert verdict is not None
    assert verdict.lines == ("instance 0 on host node0 (pid 100) ended with exit status 1 in step 3",)


@pytest.mark.parametrize(
    "record",
    [in_state(State.RUNNING, 1), in_state(State.LEAVING, 1), in_state(State.LEAVING_INSIDE, 1)],
    ids=lambda record: record.state.name,
)
def test_only_who_is_inside_of_a_collective_waits_in_vain(record: ProgressRecord) -> None:
    assert vain_waits(job((None, record), (exited(0), running()))) == frozenset()


class TestWhoIsStuck:
    def test_is_not_the_one_for_which_another_has_waited_before(self) -> None:
        assert find_stuck(job((None, in_state(State.RUNNING, 1)), (None, running())), 11.0, 10.0) is None

    def test_is_the_one_waited_for_though_others_leave_and_are_busy(self) -> None:
        facts = job((None, inside(1)), (None, running()), (None, leaving()), (None, running(since_s=9.0)))
        assert find_stuck(facts, 11.0, 10.0) == 1


class TestAJobThatNoInstanceExplains:
    def test_says_how_mpirun_ended_and_ends_alike(self) -> None:
        verdict = judge_missing(job((exited(0), running()), (None, running())), 213)
        assert verdict.exit_status == 213
        assert verdict.lines[0] == "mpirun ended with 213 before every instance had completed"

    def test_says_that_instances_did_not_start_in_time(self) -> None:
        verdict = judge_missing([Facts(0, "h", 7), Facts(1)], None)
        assert verdict.exit_status == 1
        assert verdict.lines[:2] == (
            "mpirun did not start every instance in time before every instance had completed",
            "instance 1 never started",
        )

    def test_was_ended_where_all_had_started(self) -> None:
        verdict = judge_missing(job((None, running())), None)
        assert verdict.lines[0] == "the job was ended before every instance had completed"

    def test_says_who_had_to_stop_where(self) -> None:
        facts = [Facts(index, host, 7, exited(1, told=True)) for index, host in enumerate("abb")]
        assert judge_missing(facts, 1).lines[1:] == (
            "instance 0 on host a had to stop because mpirun said so, or is gone, or its daemon there is",
            "instances 1-2 on host b had to stop because mpirun said so, or is gone, or its daemon there is",
        )

    def test_that_lost_a_daemon_ends_with_1(self) -> None:
        facts = [Facts(0, HERE, 7), replace(Facts(1, "b", 8), orphaned_at_s=5.0, told_at_s=5.0)]
        verdict = judge(facts, HERE)
        assert verdict is not None
        assert (verdict.instance, verdict.exit_status, verdict.lost) == (None, 1, (1,))
