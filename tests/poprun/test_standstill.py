"""Who stands still, or what has brought a job to a halt, from the start of its instances to their end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from popdist.records.progress import ProgressRecord, State
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.supervisor.diagnosis import judge_stuck, vain_waits
from poprun.supervisor.standstill import BUSY_FACTOR, LEAST_S, find_absent, find_halt, find_stopped

NOW_S = 1000.0
LIMIT_S = 20.0
UNUSED = ProgressRecord()
IMPORTS = ProgressRecord(state=State.RUNNING)
RUNS = ProgressRecord(3, 4, "barrier", State.RUNNING, 990.0)
FINISHED = ProgressRecord(3, 4, "barrier", State.FINISHED, 1.0)
DONE = Ending(EndKind.EXIT, 0, 990.0)


def joins(for_s: float) -> ProgressRecord:
    return ProgressRecord(state=State.JOINING, since_s=NOW_S - for_s)


def job(*records: ProgressRecord, **of_the_last: object) -> list[Facts]:
    facts = [Facts(index, "node0", 100 + index, record=record) for index, record in enumerate(records)]
    facts = [replace(each, answered_at_s=NOW_S, busy_at_s=NOW_S) for each in facts]
    return [*facts[:-1], replace(facts[-1], **of_the_last)]  # type: ignore[arg-type]


class TestStopped:
    @pytest.mark.parametrize("record", [UNUSED, IMPORTS, joins(1.0), RUNS, FINISHED], ids=lambda each: each.state.name)
    @pytest.mark.parametrize("other", [None, DONE], ids=["others run", "others have ended"])
    def test_whatever_it_does_and_whoever_waits_for_it(self, record: ProgressRecord, other: Ending | None) -> None:
        facts = job(RUNS, record, stopped_since_s=NOW_S - LIMIT_S)
        facts[0] = replace(facts[0], ending=other)
        assert find_stopped(facts, NOW_S, LIMIT_S) == 1
        assert find_stopped(facts, NOW_S - 0.1, LIMIT_S) is None

    def test_of_several_the_first(self) -> None:
        facts = [replace(each, stopped_since_s=900.0 - each.index) for each in job(RUNS, RUNS)]
        assert find_stopped(facts, NOW_S, LIMIT_S) == 1

    def test_nobody_who_has_ended_or_was_given_up(self) -> None:
        assert find_stopped(job(RUNS, RUNS, stopped_since_s=900.0, ending=DONE), NOW_S, LIMIT_S) is None
        assert find_stopped(job(RUNS, RUNS, stopped_since_s=900.0, is_given_up=True), NOW_S, LIMIT_S) is None


class TestAbsentFromInit:
    @pytest.mark.parametrize("record", [UNUSED, IMPORTS], ids=["before popdist", "importing in popdist.init"])
    def test_is_stuck_when_it_does_nothing_while_another_waits(self, record: ProgressRecord) -> None:
        facts = job(joins(LIMIT_S), record, busy_at_s=NOW_S - LIMIT_S)
        assert find_absent(facts, NOW_S, LIMIT_S) == 1
        assert find_absent(facts, NOW_S - 0.1, LIMIT_S) is None

    def test_may_work_ten_times_as_long(self) -> None:
        late_s = BUSY_FACTOR * LIMIT_S
        assert find_absent(job(joins(late_s - 0.1), IMPORTS), NOW_S, LIMIT_S) is None
        assert find_absent(job(joins(late_s), IMPORTS), NOW_S, LIMIT_S) == 1

    def test_is_not_stuck_before_another_has_waited(self) -> None:
        assert find_absent(job(joins(LIMIT_S - 0.1), UNUSED, busy_at_s=1.0), NOW_S, LIMIT_S) is None

    def test_is_nobody_where_nobody_waits(self) -> None:
        """All may prepare data for hours, or sleep, before they begin; and a program may never use popdist."""
        facts = [replace(each, busy_at_s=1.0) for each in job(UNUSED, UNUSED, IMPORTS)]
        assert find_absent(facts, NOW_S, LIMIT_S) is None

    def test_has_ten_seconds_on_a_busy_machine(self) -> None:
        assert find_absent(job(joins(LEAST_S - 1), UNUSED, busy_at_s=1.0), NOW_S, 1.0) is None
        assert find_absent(job(joins(LEAST_S), UNUSED, busy_at_s=1.0), NOW_S, 1.0) == 1

    @pytest.mark.parametrize(
        ("state", "what"),
        [
            ("T", "stopped by a signal or a debugger"),
            ("S", "asleep, or waits for something (process state S)"),
            ("D", "waiting for a disk or a file server (process state D)"),
            ("R", "computing (process state R)"),
        ],
    )
    def test_is_named_with_what_it_does(self, state: str, what: str) -> None:
        verdict = judge_stuck(job(joins(LIMIT_S), joins(3.0), UNUSED, state=state), 2, LIMIT_S)
        assert verdict.exit_status == 124
        assert verdict.lines == (
            "instance 2 on host node0 (pid 102) has made no progress for 20 s (--stuck-timeout-s) before popdist.init: "
            f"it is {what}",
            "instances 0-1 were in popdist.init, waiting for instance 2",
        )

    def test_is_waited_for_in_vain_once_it_has_ended(self) -> None:
        assert vain_waits(job(joins(1.0), UNUSED, ending=DONE)) == {(0, 1, 0)}
        assert vain_waits(job(joins(1.0), RUNS, ending=DONE)) == frozenset()  # it was there


class TestAHalt:
    def test_is_an_agent_that_does_not_answer(self) -> None:
        facts = job(RUNS, RUNS, answered_at_s=NOW_S - LIMIT_S)
        assert find_halt(facts, NOW_S - 0.1, LIMIT_S, 0.0) is None
        verdict = find_halt(facts, NOW_S, LIMIT_S, 0.0)
        assert verdict is not None
        assert (verdict.instance, verdict.exit_status, verdict.lost, verdict.is_of_hosts) == (1, 124, (1,), True)
        assert verdict.lines == (
            "instance 1 on host node0 (pid 101) was lost: its supervisor process has not answered for 20 s "
            "(--stuck-timeout-s); that process, or its host, is stopped",
        )

    def test_is_none_while_an_agent_waits_for_a_busy_machine(self) -> None:
        facts = job(RUNS, RUNS, answered_at_s=NOW_S - LEAST_S + 1)
        assert find_halt(facts, NOW_S, 1.0, 0.0) is None

    def test_is_mpirun_that_is_stopped(self) -> None:
        assert find_halt(job(RUNS, RUNS), NOW_S, LIMIT_S, LIMIT_S - 0.1) is None
        verdict = find_halt(job(RUNS, RUNS), NOW_S, LIMIT_S, LIMIT_S)
        assert verdict is not None
        assert (verdict.instance, verdict.exit_status, verdict.is_of_hosts) == (None, 124, True)
        assert verdict.lines == ("mpirun was stopped by a signal or a debugger for 20 s (--stuck-timeout-s)",)

    def test_is_open_mpi_that_connects_nobody_though_all_have_come(self) -> None:
        assert find_halt(job(joins(30.0), joins(LIMIT_S - 0.1)), NOW_S, LIMIT_S, 0.0) is None
        assert find_halt(job(joins(30.0), joins(30.0), UNUSED), NOW_S, LIMIT_S, 0.0) is None
        verdict = find_halt(job(joins(30.0), joins(LIMIT_S)), NOW_S, LIMIT_S, 0.0)
        assert verdict is not None
        assert verdict.lines[0].startswith("instances 0-1 have waited for 20 s (--stuck-timeout-s) in popdist.init")
