"""Which instances a job goes on without, and who is told of it."""

from __future__ import annotations

from collections.abc import Collection

from popdist.records.progress import ProgressRecord, State
from poprun.ipc.facts import Ending, EndKind, Facts
from poprun.supervisor.job_actions import Action, Ask, Release, Say, Stop
from poprun.supervisor.job_events import InstanceEnded, MemberConnected, MemberLost, ProgressCame
from poprun.supervisor.members import Members
from poprun.supervisor.survival import Survival

WAITS = ProgressRecord(3, 5, "barrier", State.IN_COLLECTIVE, 1.0)


def killed(at_s: float = 2.0) -> Ending:
    return Ending(EndKind.SIGNAL, 9, at_s)


def exited(status: int, at_s: float = 2.0, told: bool = False) -> Ending:
    return Ending(EndKind.EXIT, status, at_s, told)


class Job:
    """Instances that have joined, and what becomes of them."""

    def __init__(self, count: int, least: int = 1) -> None:
        self.members = Members(count)
        self.survival = Survival(self.members, least)
        for index in range(count):
            self.members.take(MemberConnected(index, 100 + index, f"node{index}"), 0.5)
            self.members.take(ProgressCame(index, WAITS), 1.0)

    def end(self, index: int, ending: Ending) -> None:
        self.members.take(InstanceEnded(index, ending), ending.at_s)

    def give_up(self, useless: Collection[int] = (), was_told: bool = False) -> list[Action]:
        return self.survival.give_up(useless, lambda ending: was_told, self._describe)

    @staticmethod
    def _describe(each: Facts) -> str:
        return f"{each.index} is lost"


def said(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Say)]


def test_one_that_had_ended_well_before_is_not_lost() -> None:
    job = Job(4)
    job.end(0, exited(0, 1.5))
    job.end(2, killed())
    actions = job.give_up()
    assert [action for action in actions if not isinstance(action, Say)] == [Stop(2), Release(1, 1), Release(3, 1)]
    assert said(actions) == ["2 is lost; instances 1, 3 go on without it"]
    assert job.survival.losses == ["2 is lost"]


def test_one_that_was_told_to_stop_is_not_lost() -> None:
    job = Job(3)
    job.end(0, exited(1, told=True))
    assert job.give_up() == []


def test_the_one_that_is_left_is_told_how_many_are_lost() -> None:
    job = Job(3)
    job.end(0, killed())
    job.give_up()
    job.end(2, exited(3, 4.0))
    actions = job.give_up()
    assert [action for action in actions if isinstance(action, Release)] == [Release(1, 2)]
    assert said(actions) == ["2 is lost; instance 1 goes on without it"]


def test_one_that_is_of_no_use_is_given_up_though_it_lives() -> None:
    job = Job(3)
    assert [action for action in job.give_up({1}) if isinstance(action, Stop | Release)] == [
        Stop(1),
        Release(0, 1),
        Release(2, 1),
    ]


def test_what_the_user_has_told_to_end_is_no_loss() -> None:
    job = Job(3)
    job.end(0, killed())
    assert job.give_up(was_told=True) == []


def test_what_kept_the_others_from_going_on_first_is_what_is_said() -> None:
    job = Job(4, least=3)
    job.end(0, killed())
    job.end(1, killed())
    assert job.give_up() == []
    assert job.survival.obstacle == "2 instances would be left, --min-instances is 3: the job ends"
    job.end(2, killed(2.5))
    assert job.give_up() == []
    assert job.survival.obstacle == "2 instances would be left, --min-instances is 3: the job ends"


def test_without_the_wish_nobody_goes_on() -> None:
    job = Job(3, least=0)
    job.end(0, killed())
    assert job.give_up() == []
    assert job.survival.obstacle == ""


class TestWhatIsKnown:
    def test_how_a_program_has_ended_stays_known_when_its_agent_goes(self) -> None:
        job = Job(2)
        job.end(0, exited(0))
        job.members.take(MemberLost(0, "Connection reset by peer"), 2.5)
        job.members.take(MemberLost(1, "Connection timed out"), 3.0)
        assert [each.ending for each in job.members.facts] == [
            exited(0),
            Ending(EndKind.LOST, 0, 3.0, fault="Connection timed out"),
        ]

    def test_who_has_gone_is_told_nothing_more(self) -> None:
        job = Job(2)
        job.members.take(MemberLost(1), 2.5)
        assert job.members.ask() == [Ask(0)]
        assert job.members.release(1, 1) == job.members.give_up(1) == []
        assert job.members.release(0, 1) == [Release(0, 1)]
