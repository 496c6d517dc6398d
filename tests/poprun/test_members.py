from __future__ import annotations

from job_scripts import ASK, CLOSED, LOST, ORPHANED, RELEASE, STOP, TOLD, exited, running

from poprun.ipc.facts import EndKind
from poprun.supervisor.job_events import (
    AgentOrder,
    InstanceChanged,
    InstanceEnded,
    MemberConnected,
    ProgressCame,
)
from poprun.supervisor.members import JobMembers


def members(count: int = 1) -> JobMembers:
    found = JobMembers(count)
    for index in range(count):
        found.take(MemberConnected(index, 77, "node0"), 1.0)
    return found


def test_an_instance_is_asked_until_every_question_is_answered():
    only = members()
    assert not only.are_asked
    assert only.ask() == [AgentOrder(ASK, 0)]
    only.ask()
    for is_asked in (True, False):
        only.take(ProgressCame(0, running()), 2.0)
        assert only.are_asked == is_asked
    only.ask()
    only.take(InstanceEnded(0, exited()), 3.0)
    assert not only.are_asked


def test_an_ended_instance_is_not_asked():
    both = members(2)
    both.take(InstanceEnded(0, exited()), 2.0)
    assert both.ask() == [AgentOrder(ASK, 1)]


def test_no_order_goes_to_an_instance_that_is_not_connected():
    both = JobMembers(2)
    both.take(MemberConnected(1, 77, "node0"), 1.0)
    assert (both.ask(), both.stop(), both.release(0, 1)) == ([AgentOrder(ASK, 1)], [AgentOrder(STOP, 1)], [])
    assert both.give_up(0) == []
    assert both.release(1, 1) == [AgentOrder(RELEASE, 1, 1)]
    both.take(InstanceChanged(1, LOST), 2.0)
    assert both.stop() == []


def test_an_instance_lost_without_a_report_has_ended_now():
    only = members()
    only.take(InstanceChanged(0, LOST, "Connection timed out"), 7.0)
    ending = only.facts[0].ending
    assert ending is not None
    assert (ending.kind, ending.at_s, ending.fault) == (EndKind.LOST, 7.0, "Connection timed out")
    assert only.all_closed


def test_an_instance_lost_after_its_end_keeps_that_end():
    only = members()
    only.take(InstanceEnded(0, exited(3)), 5.0)
    only.take(InstanceChanged(0, LOST), 7.0)
    assert only.facts[0].ending == exited(3)


def test_all_are_closed_when_nothing_is_left_of_the_started_instances():
    found = JobMembers(3)
    assert found.all_closed
    for index in range(2):
        found.take(MemberConnected(index, 77, "node0"), 1.0)
    found.take(InstanceChanged(0, CLOSED), 2.0)
    assert not found.all_closed
    found.take(InstanceChanged(1, CLOSED), 2.0)
    assert found.all_closed
    assert not found.all_connected


def test_the_time_of_an_order_to_stop_is_kept():
    both = members(2)
    both.take(InstanceChanged(0, TOLD), 4.0)
    both.take(InstanceChanged(1, ORPHANED), 5.0)
    assert [(each.told_at_s, each.orphaned_at_s) for each in both.facts] == [(4.0, 0.0), (5.0, 5.0)]
