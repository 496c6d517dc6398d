from __future__ import annotations

from dataclasses import replace

import pytest

from popdist.records.progress import ProgressRecord, State
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.supervisor.diagnosis import (
    MOST_LINES,
    find_stuck,
    first_cause,
    has_failed,
    judge,
    judge_missing,
    judge_stuck,
    list_instances,
    vain_waits,
)

HERE = "node0"


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


class TestWhatOpenMPIEnds:
    """As where one host cannot connect to another: mpirun alone knows why."""

    @pytest.mark.parametrize(
        ("record", "status", "needs_mpirun"),
        [
            (ProgressRecord(0, 0, "", State.RUNNING, 0.0), 14, True),
            (ProgressRecord(0, 0, "", State.JOINING, 1.0), 14, True),
            (ProgressRecord(3, 5, "barrier", State.IN_COLLECTIVE, 1.0, (0,)), 14, True),
            (ProgressRecord(3, 4, "barrier", State.RUNNING, 1.0), 14, False),
            (ProgressRecord(0, 0, "", State.JOINING, 1.0), 1, False),
        ],
    )
    def test_is_told_with_the_words_of_mpirun_where_it_may_have_been_open_mpi(self, record, status, needs_mpirun):
        facts = job((None, running()), (exited(status), record))
        assert judge(facts, HERE).is_unexplained is needs_mpirun


class TestAHostThatHasLostItsDaemon:
    """Instances 2 and 3 run on host b; Open MPI lets instance 0 on host a fail."""

    def facts(self, told_at_s, victim=None, record=None):
        victim, record = victim or exited(14, 10.0), record or inside()
        hosts = ["a", "a", "b", "b"]
        ends = [victim, None, None, None]
        return [
            Facts(index, hosts[index], 100 + index, ends[index], record, told_at_s[index])
            for index in range(len(hosts))
        ]

    def test_is_named_with_its_instances(self):
        verdict = judge(self.facts((0.0, 0.0, 9.9, 9.8)), "a")
        assert verdict.instance is None
        assert verdict.exit_status == 1
        assert verdict.lines[0] == "host b has lost its daemon of Open MPI, and with it instances 2-3"

    @pytest.mark.parametrize(
        "told_at_s", [(0.0, 0.0, 0.0, 9.9), (9.9, 9.9, 9.9, 9.9), (0.0, 10.1, 10.1, 10.1), (0.0, 0.0, 9.9, 10.1)]
    )
    def test_is_none_whose_instances_were_told_later_or_not_alone(self, told_at_s):
        assert judge(self.facts(told_at_s), "a").instance == 0

    def test_is_none_when_an_instance_failed_by_itself(self):
        assert judge(self.facts((0.0, 0.0, 9.9, 9.9), record=running()), "a").instance == 0
        assert judge(self.facts((0.0, 0.0, 9.9, 9.9), victim=killed()), "a").instance == 0

    def test_is_not_the_host_of_mpirun_which_has_none(self):
        assert judge(self.facts((0.0, 0.0, 9.9, 9.8)), "b") is None

    @pytest.mark.parametrize(
        ("orphaned_at_s", "host"),
        [((0.0, 0.0, 9.0), "c"), ((0.0, 9.1, 9.0), "c"), ((8.99, 9.0, 0.0), "b"), ((8.0, 9.0, 0.0), "")],
        ids=["the only one", "the first one", "at once with mpirun", "after mpirun"],
    )
    def test_is_the_one_whose_agents_say_so_first_whatever_has_become_of_others(self, orphaned_at_s, host):
        """mpirun runs on host a; where it has gone first, who fails in a collective then does so because of that."""
        facts = [
            Facts(index, "abc"[index], 100 + index, killed(told=True), inside(), 9.0, at_s)
            for index, at_s in enumerate(orphaned_at_s)
        ]
        verdict = judge([*facts, Facts(3, "a", 103, exited(14, 8.5), inside())], "a")
        line = f"host {host} has lost its daemon of Open MPI, and with it instance {'abc'.find(host)}"
        assert verdict.lines[0].startswith(line) if host else verdict is None


class TestAJobThatABatchSystemEnds:
    """SIGTERM comes to instance 1 and to its agent; instance 0 loses its connection to it."""

    def facts(self, victim=None, record=None, told=True):
        swept = Facts(1, "node1", 101, killed(15, 10.0, told), inside(), told_at_s=10.0)
        return [Facts(0, "node0", 100, victim or exited(14, 10.1), record or inside()), swept]

    @pytest.mark.parametrize("told", [True, False])
    def test_blames_no_instance(self, told):
        assert judge(self.facts(told=told), HERE) is None
        assert judge_missing(self.facts(told=told), None).lines == (
            "the job was ended before every instance had completed",
            "instance 1 on host node1 had to stop because SIGTERM came to all processes there, "
            "as when a batch system ends a job",
        )

    def test_blames_one_that_failed_by_itself(self):
        assert judge(self.facts(exited(1), running()), HERE).instance == 0
        assert judge(self.facts(killed(9, 9.0)), HERE).instance == 0

    def test_is_another_one_than_an_instance_to_which_alone_the_signal_came(self):
        assert judge([Facts(0, "node0", 100, None, inside()), Facts(1, "node1", 101, killed(15))], HERE).instance == 1


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

    def test_a_lost_agent_is_a_failure(self):
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
        verdict = judge(job((None, inside(1)), (exited(3), running()), (None, inside(1))), HERE)
        assert verdict is not None
        assert (verdict.instance, verdict.exit_status) == (1, 3)
        assert verdict.lines == (
            "instance 1 on host node1 (pid 101) ended with exit status 3 in step 3, after collective 4, barrier",
            "instances 0, 2 were in collective 5, all_reduce 'gradients', step 3, waiting for instance 1",
        )

    def test_what_open_mpi_ended_needs_its_own_words(self):
        """Before the program has a record, or in a collective, on one of several hosts, with no exception's status."""
        there = ((None, inside(1)), (None, ProgressRecord()))
        for ending, record, is_aborted in (
            (exited(14), ProgressRecord(), True),
            (exited(14), inside(0), True),
            (exited(3), running(), False),
            (exited(1), ProgressRecord(), False),
            (killed(11), ProgressRecord(), False),
        ):
            facts = job(*there, (ending, record))
            assert judge(facts, HERE).is_unexplained is is_aborted
            assert not judge([replace(each, host="node0") for each in facts], HERE).is_unexplained

    def test_a_signal(self):
        verdict = judge(job((killed(11), inside()), (None, ProgressRecord())), HERE)
        assert verdict is not None
        assert verdict.exit_status == 139
        assert verdict.lines == (
            "instance 0 on host node0 (pid 100) was killed by SIGSEGV in step 3, "
            "inside collective 5, all_reduce 'gradients'",
        )

    def test_a_premature_end(self):
        facts = job((exited(0), leaving()), (None, inside(0)))
        verdict = judge(facts, HERE, vain_waits(facts))
        assert verdict is not None
        assert verdict.exit_status == 1
        assert verdict.lines[0] == (
            "instance 0 on host node0 (pid 100) ended with exit status 0 too early: instance 1 still needed it"
        )

    def test_a_lost_agent(self):
        verdict = judge(job((lost(), running())), HERE)
        assert verdict is not None
        assert verdict.exit_status == 137

    def test_without_records_it_is_one_line(self):
        verdict = judge(job((exited(1), ProgressRecord()), (None, ProgressRecord())), HERE)
        assert verdict is not None
        assert verdict.lines == ("instance 0 on host node0 (pid 100) ended with exit status 1",)

    def test_it_is_never_long(self):
        others = [(None, inside(0, number=n)) for n in range(40)]
        verdict = judge(job((exited(1), running()), *others), HERE)
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


class TestAnInstanceThatIsStuck:
    """Everything in `running` and `inside` began at 1 s."""

    def test_is_the_one_that_others_wait_for(self):
        assert find_stuck(job((None, inside(1)), (None, running()), (None, inside(1))), 11.0, 10.0) == 1

    def test_is_meant_before_one_that_waits_itself(self):
        facts = job((None, inside(1)), (None, inside(2)), (None, running()))
        assert find_stuck(facts, 11.0, 10.0) == 2

    def test_may_be_inside_the_same_collective(self):
        assert find_stuck(job((None, inside(1)), (None, inside())), 11.0, 10.0) == 1

    def test_is_one_of_those_that_wait_for_each_other(self):
        assert find_stuck(job((None, inside(1)), (None, inside(0, number=4))), 11.0, 10.0) == 1

    def test_is_none_before_the_limit(self):
        assert find_stuck(job((None, inside(1)), (None, running())), 10.9, 10.0) is None

    def test_is_none_that_has_done_something_meanwhile(self):
        busy = ProgressRecord(3, 4, "barrier", State.RUNNING, 5.0)
        assert find_stuck(job((None, inside(1)), (None, busy)), 11.0, 10.0) is None

    def test_is_none_that_nobody_waits_for(self):
        assert find_stuck(job((None, running()), (None, running())), 100.0, 10.0) is None

    def test_is_none_that_has_ended(self):
        assert find_stuck(job((None, inside(1)), (exited(0), running())), 100.0, 10.0) is None

    def test_is_the_one_that_does_not_come_to_the_end(self):
        facts = job((None, leaving()), (None, running()), (exited(0), leaving()))
        assert find_stuck(facts, 12.0, 10.0) == 1
        assert judge_stuck(facts, 1, 10.0).lines[1:] == ("instance 0 had come to the end of the program",)

    @pytest.mark.parametrize(
        "second",
        [
            (None, ProgressRecord(3, 4, "barrier", State.RUNNING, 5.0)),
            (None, ProgressRecord(3, 4, "barrier", State.FINISHED, 1.0)),
            (None, ProgressRecord()),
            (exited(0), running()),
        ],
        ids=["busy", "finished", "without a record", "ended"],
    )
    def test_is_none_at_the_end_that_others_need_not_wait_for(self, second):
        assert find_stuck(job((None, leaving()), second), 12.0, 10.0) is None

    def test_is_none_at_the_end_while_another_one_is_busy(self):
        busy = ProgressRecord(3, 4, "barrier", State.RUNNING, 5.0)
        assert find_stuck(job((None, leaving()), (None, running()), (None, busy)), 11.0, 10.0) is None

    @pytest.mark.parametrize(
        ("state", "stack", "where"),
        [
            ("T", "", "stopped by a signal or a debugger"),
            ("R", 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in f', "at a.py, line 3, in f"),
            ("S", "", "at a place that it does not show"),
            ("", "", "at a place that it does not show"),
        ],
    )
    def test_is_described_by_what_it_does(self, state, stack, where):
        facts = job((None, inside(1)), (None, running()))
        facts[1] = replace(facts[1], state=state, stack=stack)
        verdict = judge_stuck(facts, 1, 10.0)
        assert (verdict.instance, verdict.exit_status, verdict.lost) == (1, 124, (1,))
        assert verdict.lines == (
            "instance 1 on host node1 (pid 101) has made no progress for 10 s (--stuck-timeout-s) in step 3, after "
            f"collective 4, barrier: it is {where}",
            "instance 0 was in collective 5, all_reduce 'gradients', step 3, waiting for instance 1",
        )


class TestAfterALossThatWasSurvived:
    def test_a_later_failure_has_causes_of_its_own(self):
        facts = job((exited(0), running()), (killed(at_s=5.0), running()), (exited(7, at_s=20.0), running()))
        facts[1] = replace(facts[1], is_given_up=True)
        assert first_cause(facts) == 2

    def test_who_cannot_do_without_the_lost_one_passes_the_blame_on(self):
        facts = job((exited(1, at_s=20.0), inside(1)), (killed(at_s=5.0), running()))
        facts[1] = replace(facts[1], is_given_up=True)
        assert first_cause(facts) == 1

    def test_it_is_not_seen_as_a_failure_again(self):
        facts = job((None, inside(1)), (killed(), running()))
        assert has_failed(facts)
        facts[1] = replace(facts[1], is_given_up=True)
        assert not has_failed(facts)

    def test_a_broken_connection_is_of_the_hosts(self):
        broken = Ending(EndKind.LOST, 0, 20.0, fault="Connection timed out")
        facts = job((None, inside(1)), (broken, running()))
        assert judge(facts, "node0").is_of_hosts
        assert not judge(job((None, inside(1)), (killed(), running())), "node0").is_of_hosts
