from __future__ import annotations

import pytest

from popdist.environments.progress import ProgressRecord, State
from poprun.diagnosis import (
    MOST_LINES,
    first_cause,
    has_failed,
    judge,
    judge_missing,
    list_instances,
    vain_waits,
)
from poprun.facts import Ending, EndKind, Facts


def exited(status: int, at_s: float = 10.0, told: bool = False) -> Ending:
    return Ending(EndKind.EXIT, status, at_s, told)


def killed(number: int = 9, at_s: float = 10.0, told: bool = False) -> Ending:
    return Ending(EndKind.SIGNAL, number, at_s, told)


def lost(at_s: float = 10.0) -> Ending:
    return Ending(EndKind.LOST, 0, at_s)


def running(number: int = 4) -> ProgressRecord:
    return ProgressRecord(3, number, "barrier", State.RUNNING, 1.0)


def inside(*waiting_for: int, number: int = 5, label: str = "all_reduce 'gradients'") -> ProgressRecord:
    return ProgressRecord(3, number, label, State.IN_COLLECTIVE, 1.0, waiting_for)


def leaving(number: int = 4) -> ProgressRecord:
    return ProgressRecord(3, number, "barrier", State.LEAVING, 2.0)


def job(*instances: tuple[Ending | None, ProgressRecord]) -> list[Facts]:
    return [
        Facts(index, f"node{index}", 100 + index, ending, record) for index, (ending, record) in enumerate(instances)
    ]


class TestFirstCause:
    def test_the_only_failure(self):
        assert first_cause(job((None, inside(1)), (exited(3), running()))) == 1

    def test_the_earliest_failure(self):
        assert first_cause(job((exited(1, 11.0), running()), (exited(2, 10.0), running()))) == 1

    def test_a_signal_wins_over_an_exit_of_the_same_moment(self):
        assert first_cause(job((exited(1, 10.0), running()), (killed(9, 10.02), running()))) == 1
        assert first_cause(job((exited(1, 10.0), running()), (killed(9, 10.2), running()))) == 0

    def test_a_victim_passes_the_blame_to_the_one_it_waited_for(self):
        facts = job((exited(1, 10.0), inside(1)), (exited(7, 10.3), running()))
        assert first_cause(facts) == 1

    def test_blame_is_passed_along_a_chain(self):
        facts = job((exited(1, 10.0), inside(1)), (exited(1, 10.1), inside(2)), (exited(1, 10.2), running()))
        assert first_cause(facts) == 2

    def test_blame_does_not_go_round_in_circles(self):
        facts = job((exited(1, 10.0), inside(1)), (exited(1, 10.1), inside(0)))
        assert first_cause(facts) in (0, 1)

    def test_one_that_left_with_status_0_is_the_cause_of_the_error_of_another(self):
        assert first_cause(job((exited(0, 9.0), leaving()), (exited(1, 10.0), inside(0)))) == 0

    def test_that_holds_too_when_the_wait_was_too_short_to_be_noted(self):
        assert first_cause(job((exited(0, 9.0), leaving(4)), (exited(1, 10.0), inside(number=5)))) == 0

    def test_an_error_outside_collectives_is_ones_own(self):
        assert first_cause(job((exited(0, 9.0), leaving()), (exited(1, 10.0), running()))) == 1

    def test_a_signal_is_ones_own_even_inside(self):
        assert first_cause(job((exited(0, 9.0), leaving()), (killed(), inside(0)))) == 1

    def test_an_instance_that_is_alive_and_well_is_not_blamed_for_a_time_out(self):
        assert first_cause(job((exited(1), inside(1)), (None, running()))) == 0

    def test_those_told_to_stop_are_not_blamed(self):
        facts = job((killed(9, 9.0, told=True), inside()), (exited(1, 10.0), running()))
        assert first_cause(facts) == 1

    def test_after_mpi_abort_the_one_that_ended_by_itself(self):
        facts = job((killed(9, 10.0, told=True), inside()), (exited(5, 9.9, told=True), running()))
        assert first_cause(facts) == 1

    def test_nobody_when_all_were_told(self):
        facts = job((killed(told=True), inside()), (killed(told=True), inside()))
        assert first_cause(facts) is None
        assert not has_failed(facts)

    def test_a_lost_shim_is_a_failure(self):
        assert first_cause(job((None, inside(1)), (lost(), running()))) == 1

    def test_a_vain_wait_alone_blames_the_one_that_left(self):
        facts = job((exited(0), leaving()), (None, inside(0)))
        assert first_cause(facts, vain_waits(facts)) == 0
        assert first_cause(facts) is None


class TestVainWaits:
    def test_a_wait_for_one_that_has_ended_well(self):
        assert vain_waits(job((exited(0), running()), (None, inside(0)))) == {(1, 0, 5)}

    def test_a_wait_for_one_in_its_exit_handlers(self):
        assert vain_waits(job((None, leaving()), (None, inside(0)))) == {(1, 0, 5)}

    @pytest.mark.parametrize(
        "facts",
        [
            job((None, running()), (None, inside(0))),
            job((exited(0), running()), (None, running())),
            job((exited(0), running()), (None, inside())),
            job((exited(0), leaving()), (None, leaving())),
            job((exited(0), running()), (exited(0), inside(0))),
        ],
    )
    def test_everything_else_is_not_in_vain(self, facts):
        assert vain_waits(facts) == frozenset()


class TestVerdict:
    def test_it_names_instance_host_end_and_collectives(self):
        verdict = judge(job((None, inside(1)), (exited(3), running()), (None, inside(1))))
        assert verdict is not None
        assert (verdict.instance, verdict.exit_status) == (1, 3)
        assert verdict.lines == (
            "instance 1 on host node1 (pid 101) ended with exit status 3 in step 3, after collective 4, barrier",
            "instances 0, 2 were in collective 5, all_reduce 'gradients', step 3, waiting for instance 1",
        )

    def test_a_signal(self):
        verdict = judge(job((killed(11), inside()), (None, ProgressRecord())))
        assert verdict is not None
        assert verdict.exit_status == 139
        assert verdict.lines == (
            "instance 0 on host node0 (pid 100) was killed by SIGSEGV in step 3, "
            "inside collective 5, all_reduce 'gradients'",
        )

    def test_a_premature_end(self):
        facts = job((exited(0), leaving()), (None, inside(0)))
        verdict = judge(facts, vain_waits(facts))
        assert verdict is not None
        assert verdict.exit_status == 1
        assert verdict.lines[0] == (
            "instance 0 on host node0 (pid 100) ended with exit status 0 too early: instance 1 still needed it"
        )

    def test_a_lost_shim(self):
        verdict = judge(job((lost(), running())))
        assert verdict is not None
        assert verdict.exit_status == 137

    def test_without_records_it_is_one_line(self):
        verdict = judge(job((exited(1), ProgressRecord()), (None, ProgressRecord())))
        assert verdict is not None
        assert verdict.lines == ("instance 0 on host node0 (pid 100) ended with exit status 1",)

    def test_it_is_never_long(self):
        others = [(None, inside(0, number=n)) for n in range(40)]
        verdict = judge(job((exited(1), running()), *others))
        assert verdict is not None
        assert len(verdict.lines) == MOST_LINES

    def test_missing_instances_are_named(self):
        facts = [Facts(0, "h", 7, exited(0)), Facts(1, "h", 8), Facts(2), Facts(3)]
        verdict = judge_missing(facts, 0)
        assert (verdict.instance, verdict.exit_status, verdict.is_unexplained) == (None, 1, True)
        assert verdict.lines[1:] == (
            "instances 2-3 never started",
            "instance 1 on host h (pid 8) did not report how it ended",
        )


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "instance 3"),
        ([0, 1, 2, 5], "instances 0-2, 5"),
        ([4, 2], "instances 2, 4"),
        ([0, 1], "instances 0-1"),
    ],
)
def test_instances_are_listed_in_short(indices, text):
    assert list_instances(indices) == text
