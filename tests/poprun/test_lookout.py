"""The detection of instances that are stuck, waited for in vain, or given up, from their start to their end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_scripts import RELEASE, STOP, exited, killed

from popdist.records.progress import ProgressRecord, State
from poprun.ipc.facts import Ending, EndKind, Facts, Loss
from poprun.supervisor.diagnosis import judge_stuck, vain_waits
from poprun.supervisor.job_events import (
    AgentOrder,
    InstanceEnded,
    MemberConnected,
    ProgressCame,
    Say,
)
from poprun.supervisor.lookout import (
    BLIND_S,
    BUSY_FACTOR,
    LEAST_S,
    Lookout,
    find_absent,
    find_halt,
    find_stopped,
)
from poprun.supervisor.members import JobMembers
from poprun.supervisor.survival import Survival

NOW_S = BEGIN_S = 1000.0
LIMIT_S = 20.0
UNUSED = ProgressRecord()
IMPORTS = ProgressRecord(state=State.RUNNING)
RUNS = ProgressRecord(3, 4, "barrier", State.RUNNING, 990.0)
WAITS = ProgressRecord(3, 5, "barrier", State.IN_COLLECTIVE, 1.0, (1,))
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
    def test_an_instance_stopped_for_the_limit_is_found_in_any_state(
        self, record: ProgressRecord, other: Ending | None
    ) -> None:
        facts = job(RUNS, record, stopped_since_s=NOW_S - LIMIT_S)
        facts[0] = replace(facts[0], ending=other)
        assert find_stopped(facts, NOW_S, LIMIT_S) == 1
        assert find_stopped(facts, NOW_S - 0.1, LIMIT_S) is None

    def test_the_first_of_several_stopped_instances_is_found(self) -> None:
        facts = [replace(each, stopped_since_s=900.0 - each.index) for each in job(RUNS, RUNS)]
        assert find_stopped(facts, NOW_S, LIMIT_S) == 1

    def test_ended_and_given_up_instances_are_ignored(self) -> None:
        assert find_stopped(job(RUNS, RUNS, stopped_since_s=900.0, ending=DONE), NOW_S, LIMIT_S) is None
        assert find_stopped(job(RUNS, RUNS, stopped_since_s=900.0, is_given_up=True), NOW_S, LIMIT_S) is None


class TestAbsentFromInit:
    @pytest.mark.parametrize("record", [UNUSED, IMPORTS], ids=["before popdist", "importing in popdist.init"])
    def test_an_idle_instance_is_stuck_while_another_waits_in_init(self, record: ProgressRecord) -> None:
        facts = job(joins(LIMIT_S), record, busy_at_s=NOW_S - LIMIT_S)
        assert find_absent(facts, NOW_S, LIMIT_S) == 1
        assert find_absent(facts, NOW_S - 0.1, LIMIT_S) is None

    def test_a_busy_instance_has_ten_times_the_limit(self) -> None:
        late_s = BUSY_FACTOR * LIMIT_S
        assert find_absent(job(joins(late_s - 0.1), IMPORTS), NOW_S, LIMIT_S) is None
        assert find_absent(job(joins(late_s), IMPORTS), NOW_S, LIMIT_S) == 1

    def test_an_instance_is_not_stuck_before_another_has_waited_for_the_limit(self) -> None:
        assert find_absent(job(joins(LIMIT_S - 0.1), UNUSED, busy_at_s=1.0), NOW_S, LIMIT_S) is None

    def test_an_instance_is_not_stuck_if_nobody_waits(self) -> None:
        """All may prepare data or sleep for hours before they begin, and a program may never use popdist."""
        facts = [replace(each, busy_at_s=1.0) for each in job(UNUSED, UNUSED, IMPORTS)]
        assert find_absent(facts, NOW_S, LIMIT_S) is None

    def test_the_limit_is_at_least_ten_seconds(self) -> None:
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
    def test_the_verdict_describes_the_state_of_the_process(self, state: str, what: str) -> None:
        verdict = judge_stuck(job(joins(LIMIT_S), joins(3.0), UNUSED, state=state), 2, LIMIT_S)
        assert verdict.exit_status == 124
        assert verdict.lines == (
            "instance 2 on host node0 (pid 102) has made no progress for 20 s (--stuck-timeout-s) before popdist.init: "
            f"it is {what}",
            "instances 0-1 were in popdist.init, waiting for instance 2",
        )

    def test_an_ended_instance_is_waited_for_in_vain(self) -> None:
        assert vain_waits(job(joins(1.0), UNUSED, ending=DONE)) == {(0, 1, 0)}
        assert vain_waits(job(joins(1.0), RUNS, ending=DONE)) == frozenset()  # it had joined


class TestAHalt:
    def test_an_agent_that_does_not_answer_halts_the_job(self) -> None:
        facts = job(RUNS, RUNS, answered_at_s=NOW_S - LIMIT_S)
        assert find_halt(facts, NOW_S - 0.1, LIMIT_S, 0.0) is None
        verdict = find_halt(facts, NOW_S, LIMIT_S, 0.0)
        assert verdict is not None
        assert (verdict.instance, verdict.exit_status, verdict.lost, verdict.is_of_hosts) == (1, 124, (1,), True)
        assert verdict.lines == (
            "instance 1 on host node0 (pid 101) was lost: its supervisor process has not answered for 20 s "
            "(--stuck-timeout-s); that process, or its host, is stopped",
        )

    def test_the_limit_for_agents_is_at_least_ten_seconds(self) -> None:
        facts = job(RUNS, RUNS, answered_at_s=NOW_S - LEAST_S + 1)
        assert find_halt(facts, NOW_S, 1.0, 0.0) is None

    def test_a_stopped_mpirun_halts_the_job(self) -> None:
        assert find_halt(job(RUNS, RUNS), NOW_S, LIMIT_S, LIMIT_S - 0.1) is None
        verdict = find_halt(job(RUNS, RUNS), NOW_S, LIMIT_S, LIMIT_S)
        assert verdict is not None
        assert (verdict.instance, verdict.exit_status, verdict.is_of_hosts) == (None, 124, True)
        assert verdict.lines == ("mpirun was stopped by a signal or a debugger for 20 s (--stuck-timeout-s)",)

    def test_a_halt_is_found_if_open_mpi_connects_nobody_in_init(self) -> None:
        assert find_halt(job(joins(30.0), joins(LIMIT_S - 0.1)), NOW_S, LIMIT_S, 0.0) is None
        assert find_halt(job(joins(30.0), joins(30.0), UNUSED), NOW_S, LIMIT_S, 0.0) is None
        verdict = find_halt(job(joins(30.0), joins(LIMIT_S)), NOW_S, LIMIT_S, 0.0)
        assert verdict is not None
        assert verdict.lines[0].startswith("instances 0-1 have waited for 20 s (--stuck-timeout-s) in popdist.init")


class TestLookout:
    """Instance 0 waits for instance 1, which has completed an earlier collective."""

    FACTS = (Facts(0, "node0", 100, record=WAITS), Facts(1, "node1", 101, record=replace(RUNS, since_s=1.0)))

    @pytest.fixture
    def lookout(self) -> Lookout:
        return Lookout(LIMIT_S, "node0", BEGIN_S)

    def is_stuck(
        self, lookout: Lookout, begin_s: float, end_s: float, pause_s: float = 1.0, is_behind: bool = False
    ) -> bool:
        """Return whether a stuck instance is found between two times after the beginning."""
        now_s = BEGIN_S + begin_s
        while now_s <= BEGIN_S + end_s and lookout.stuck is None:
            lookout.look([replace(each, answered_at_s=now_s) for each in self.FACTS], now_s, is_behind)
            now_s += pause_s
        return lookout.stuck is not None

    def test_a_wait_is_in_vain_when_it_is_seen_twice(self, lookout: Lookout) -> None:
        facts = [self.FACTS[0], replace(self.FACTS[1], ending=DONE)]
        lookout.look(facts, 11.0, False)
        assert lookout.useless == set()
        lookout.look(facts, 11.2, False)
        assert (lookout.in_vain, lookout.useless) == ({(0, 1, 5)}, {1})
        assert lookout.judge(facts, None).instance == 1

    def test_a_stuck_instance_is_found_after_the_limit(self, lookout: Lookout) -> None:
        assert not self.is_stuck(lookout, 0, LIMIT_S - 1)
        assert self.is_stuck(lookout, LIMIT_S, LIMIT_S + 2)
        assert lookout.useless == {1}
        assert lookout.judge(self.FACTS, None).exit_status == 124
        assert "has made no progress for 20 s" in lookout.describe(self.FACTS[1], self.FACTS)

    def test_the_limit_starts_again_after_a_loss(self, lookout: Lookout) -> None:
        """The remaining instances have waited for the lost one for long, and go on only now."""
        assert self.is_stuck(lookout, 0, LIMIT_S + 2)
        lookout.forget(BEGIN_S + LIMIT_S + 2)
        assert not self.is_stuck(lookout, LIMIT_S + 2, 2 * LIMIT_S)
        assert self.is_stuck(lookout, 2 * LIMIT_S, 2 * LIMIT_S + 4)

    @pytest.mark.parametrize(
        ("limit_s", "pause_s", "is_behind", "is_stuck"),
        [
            (1.0, 0.6, False, False),  # all may have paused and be idle since
            (1.0, 0.4, False, True),
            (LIMIT_S, 1.0, True, False),
            (LIMIT_S, BLIND_S + 1, False, False),
            (0.0, 1.0, False, False),
        ],
        ids=["a short pause", "a shorter one", "poprun is behind", "poprun has not looked", "no limit"],
    )
    def test_pauses_of_poprun_are_not_counted_as_waits(
        self, limit_s: float, pause_s: float, is_behind: bool, is_stuck: bool
    ) -> None:
        lookout = Lookout(limit_s, "node0", BEGIN_S)
        assert self.is_stuck(lookout, 0, 6 * LIMIT_S, pause_s, is_behind) is is_stuck


class Group:
    """Instances that have joined, and their ends."""

    def __init__(self, count: int, least: int = 1) -> None:
        self.members = JobMembers(count)
        self.survival = Survival(self.members, least)
        for index in range(count):
            self.members.take(MemberConnected(index, 100 + index, f"node{index}"), 0.5)
            self.members.take(ProgressCame(index, WAITS), 1.0)

    def end(self, index: int, ending: Ending) -> None:
        self.members.take(InstanceEnded(index, ending), ending.at_s)

    def give_up(self, *useless: int, was_told: bool = False) -> list[AgentOrder | str]:
        """Give up instances, and return the orders and the warnings."""
        actions = self.survival.give_up(useless, lambda _: was_told, lambda each: f"{each.index} is lost")
        return [action.text if isinstance(action, Say) else action for action in actions]


class TestSurvival:
    def test_the_others_are_told_and_the_loss_is_reported(self) -> None:
        group = Group(4)
        group.end(0, exited(0, 1.5))
        group.end(2, killed(at_s=2.0))
        assert group.give_up() == [
            AgentOrder(STOP, 2),
            AgentOrder(RELEASE, 1, 1),
            AgentOrder(RELEASE, 3, 1),
            "2 is lost; instances 1, 3 go on without it",
        ]
        group.end(3, exited(3, 4.0))
        assert group.give_up() == [
            AgentOrder(STOP, 3),
            AgentOrder(RELEASE, 1, 2),
            "3 is lost; instance 1 goes on without it",
        ]
        assert group.survival.losses == [Loss("2 is lost", 2), Loss("3 is lost", 3)]

    def test_a_useless_instance_is_given_up_while_it_lives(self) -> None:
        assert Group(3).give_up(1)[:3] == [AgentOrder(STOP, 1), AgentOrder(RELEASE, 0, 1), AgentOrder(RELEASE, 2, 1)]

    @pytest.mark.parametrize(
        ("ending", "least", "was_told"),
        [(Ending(EndKind.EXIT, 1, 2.0, told=True), 1, False), (killed(), 1, True), (killed(), 0, False)],
        ids=["told by mpirun", "told by the user", "without the wish"],
    )
    def test_no_instance_is_given_up_without_shrink_or_after_an_order_to_stop(
        self, ending: Ending, least: int, was_told: bool
    ) -> None:
        group = Group(3, least)
        group.end(0, ending)
        assert group.give_up(was_told=was_told) == []
        assert group.survival.obstacle == ""

    def test_the_first_obstacle_is_kept(self) -> None:
        group = Group(4, least=3)
        group.end(0, killed())
        group.end(1, killed())
        assert group.give_up() == []
        assert group.survival.obstacle == "only 2 instances would be left, and --min-instances is 3: the job ends"
        group.end(2, killed(at_s=2.5))
        assert group.give_up() == []
        assert group.survival.obstacle == "only 2 instances would be left, and --min-instances is 3: the job ends"
