"""Resizing on purpose: requests, wishes for the instances, and answers."""

from __future__ import annotations

import re
import signal

import pytest
from job_scripts import CALL, NOTICED, PASS_ON, WANT_ACTIVE, Script, killed, leaving, running

from popdist.records.progress import Role
from popdist.records.wanted import MOST_INSTANCES, MOST_NUMBER, Wanted, number_after
from poprun.cli.log import Level
from poprun.errors import UsageError
from poprun.ipc.resizes import ResizeAnswer, ResizeRequest
from poprun.monitor.resize_command import ResizeWords, read_words
from poprun.supervisor.job_events import AgentOrder, Answer, InstanceChanged


def job(roles: str, hosts: str = "", **across: object) -> Script:
    """Return a job whose processes have had their roles for 0.5 s."""
    script = Script(len(roles), hosts, **{"least": 1, "replicas": 12, "spares": roles.count("s") or 1, **across})
    for index in range(len(roles)):
        script.note(0.1, index, running())
    script.take_roles(0.2, roles)
    return script


def answers(script: Script) -> list[tuple[int, bool, str]]:
    return [(each.asker, each.answer.is_done, each.answer.text) for each in script.all_of(Answer)]


def wishes(script: Script) -> list[tuple[int, Wanted]]:
    return [(each.instance, Wanted.unpack(each.number)) for each in script.all_of(WANT_ACTIVE)]


def test_a_wish_is_complete_when_every_process_has_it_and_fulfilled_when_every_process_has_considered_it():
    script = job("tts")
    script.ask_resize(1.0, 7, 3)
    script.run(1.0)
    assert wishes(script) == [(index, Wanted(1, 3)) for index in range(3)]
    script.run(2.0)
    assert wishes(script)[3:] == [(index, Wanted(1, 3, is_complete=True)) for index in range(3)]
    assert answers(script) == []
    script.take_roles(2.0, "ttt")
    script.run(3.0)
    assert answers(script) == [(7, True, "2 -> 3 instances")]
    script.ask_resize(3.0, 8, 1)
    script.run(4.0)
    script.take_roles(4.0, "tss")
    script.run(5.0)
    assert wishes(script)[-1] == (2, Wanted(2, 1, is_complete=True))
    assert answers(script)[1:] == [(8, True, "3 -> 1 instance")]


def test_a_wish_that_is_not_shown_by_all_is_never_complete():
    script = job("tts")
    script.at(0.9, lambda: setattr(script.instances[2], "answers", False))
    script.ask_resize(1.0, 7, 3)
    script.run(9.0)
    assert [wanted.is_complete for _, wanted in wishes(script)] == [False] * 3


def test_a_lost_process_does_not_hold_up_the_change():
    script = job("ttss")
    script.at(0.9, lambda: setattr(script.instances[1], "answers", False))
    script.ask_resize(1.0, 7, 4)
    script.end(2.0, 1, killed())
    script.run(3.0)
    assert [wanted.is_complete for _, wanted in wishes(script)[4:]] == [True] * 3
    script.take_roles(3.0, "t-tt")
    script.run(4.0)
    assert answers(script) == [(7, False, "2 -> 3 instances, not 4 as wanted: processes were lost meanwhile")]


def test_the_second_of_two_quick_requests_takes_the_place_of_the_first():
    script = job("tts")
    script.ask_resize(1.0, 7, 3)
    script.ask_resize(1.3, 8, 1)
    script.run(2.0)
    assert wishes(script)[-1] == (2, Wanted(2, 1, is_complete=True))
    script.take_roles(2.0, "tss")
    script.run(3.0)
    assert answers(script) == [(7, False, "another resize has taken its place"), (8, True, "2 -> 1 instance")]


def test_a_process_at_its_end_is_called_to_a_change_that_another_one_has_begun():
    script = job("tts")
    script.ask_resize(1.0, 7, 3)
    script.note(1.05, 1, leaving(role=Role.ACTIVE))  # before it has the wish as complete
    script.run(2.0)
    assert script.all_of(CALL) == []
    script.at(2.0, lambda: script.change_record(2, is_changing=True))
    script.run(3.0)
    assert [(each.instance, each.number) for each in script.all_of(CALL)] == [(1, 1)]
    script.at(3.0, lambda: script.change_record(0, is_changing=True))
    script.run(4.0)
    assert len(script.all_of(CALL)) == 1


def test_a_request_for_the_present_number_changes_nothing():
    script = job("tts")
    script.ask_resize(1.0, 7, 2)
    script.run(3.0)
    assert answers(script) == [(7, True, "2 -> 2 instances: nothing to change")]
    assert not any(wanted.is_complete for _, wanted in wishes(script))


@pytest.mark.parametrize(
    ("hosts", "expected"), [("node0 node0 node0 node0", (0, 1, 2, 3)), ("node0 node0 node0 node1", (0, 1, 3, 2))]
)
def test_new_carriers_have_the_order_of_their_replicas_whichever_reports_first(hosts, expected):
    script = job("tt--", hosts, spares=2)
    script.take_roles(0.5, "tt-s")
    script.take_roles(0.8, "ttss")
    script.ask_resize(1.0, 7, 4)
    script.run(2.0)
    script.take_roles(2.0, "tt-t")
    script.take_roles(2.5, "tttt")
    script.run(3.0)
    assert script.machine.carriers[-1].instances == expected


def test_instances_that_come_back_to_a_host_drive_the_last_replicas():
    script = job("ttss", "node0 node0 node1 node1")
    script.ask_resize(1.0, 7, leave=("node0",))
    script.run(2.0)
    script.take_roles(2.0, "tstt")
    script.run(3.0)
    script.take_roles(3.0, "sstt")
    script.run(4.0)
    assert [each.instances for each in script.machine.carriers] == [(0, 1), (0, 2, 3), (2, 3)]
    script.ask_resize(4.0, 8, 4, use=("node0",))
    script.run(5.0)
    script.take_roles(5.0, "tttt")
    script.run(6.0)
    assert script.machine.carriers[-1].instances == (2, 3, 0, 1)


def test_a_loss_calls_as_many_spares_as_the_last_complete_wish_allows():
    """A later wish that only bars spares does not change the number."""
    script = job("tttts", "node0 node0 node0 node0 node1")
    script.ask_resize(1.0, 7, 2)
    script.run(2.0)
    script.take_roles(2.0, "ttsss")
    script.ask_resize(3.0, 8, leave=("node1",))
    script.run(4.0)
    script.end(4.0, 1, killed())
    script.run(5.0)
    assert script.machine.carriers[-1].instances == (0, 2)
    assert [each.is_spare for each in script.machine.facts] == [False, False, False, True, True]


class TestHosts:
    def test_a_host_is_left_by_barring_its_processes(self):
        script = job("ttss", "node0 node1.org node0 node1.org")
        script.ask_resize(1.0, 7, leave=("node1",))
        script.run(2.0)
        assert wishes(script)[4:] == [(index, Wanted(1, 2, index in (1, 3), True)) for index in range(4)]
        script.take_roles(2.0, "tsts")
        script.ask_resize(3.0, 8, 3)
        script.run(4.0)
        assert answers(script)[0] == (7, True, "2 -> 2 instances")
        (_, is_done, text), *_ = answers(script)[1:]
        assert not is_done
        assert "2 active instances and 2 spares, and 2 of them on hosts that are left; ask for at most 2" in text
        script.ask_resize(4.0, 9, 3, use=("node1",))
        script.run(5.0)
        assert [wanted.is_barred for _, wanted in wishes(script)[-4:]] == [False] * 4

    def test_the_last_active_instance_of_the_hosts_that_are_left_stays_until_others_have_joined(self):
        script = job("ttss", "node0 node0 node1 node1")
        script.ask_resize(1.0, 7, leave=("node0",))
        script.run(2.0)
        assert wishes(script)[4:] == [(index, Wanted(1, 3, index == 1, True)) for index in range(4)]
        script.take_roles(2.0, "tstt")
        script.run(3.0)
        assert answers(script) == []
        assert wishes(script)[-4:] == [(index, Wanted(2, 2, index < 2, True)) for index in range(4)]
        script.take_roles(3.0, "sstt")
        script.run(4.0)
        assert answers(script) == [(7, True, "2 -> 2 instances")]

    def test_a_process_that_joins_the_job_later_is_barred_on_a_host_that_was_left(self):
        script = Script(3, "node0 node1 node1", least=1, spares=2)
        script.take_roles(0.2, "ts-")
        script.ask_resize(1.0, 7, leave=("node1",))
        script.take_roles(2.0, "tss")
        script.run(3.0)
        assert wishes(script) == [(0, Wanted(1, 1)), (1, Wanted(1, 1, True)), (2, Wanted(1, 1, True))]

    def test_a_host_is_left_once_if_its_agents_get_a_notice(self):
        script = job("tts", "node0 node1 node0")
        for _ in range(2):
            script.at(1.0, InstanceChanged(1, NOTICED))
        script.run(2.0)
        assert wishes(script)[3:] == [(index, Wanted(1, 2, index == 1, True)) for index in range(3)]
        assert script.said(Level.WARN) == ["host node1 is about to go away; other hosts take over from it"]
        script.take_roles(2.0, "tst")
        script.run(3.0)
        assert script.all_of(PASS_ON) == []

    def test_a_second_host_that_gets_a_notice_during_the_change_is_left_too(self):
        script = job("ttsss", "node0 node1 node2 node3 node3")
        script.at(1.0, InstanceChanged(0, NOTICED))
        script.at(1.1, InstanceChanged(1, NOTICED))
        script.run(2.0)
        assert wishes(script)[-5:] == [(index, Wanted(2, 3, index == 1, True)) for index in range(5)]
        script.take_roles(2.0, "tsttt")
        script.run(3.0)
        assert wishes(script)[-5:] == [(index, Wanted(3, 2, index < 2, True)) for index in range(5)]
        assert script.said(Level.WARN) == [
            f"host node{index} is about to go away; other hosts take over from it" for index in (0, 1)
        ]
        assert script.all_of(PASS_ON) == []

    @pytest.mark.parametrize(
        ("before", "counts", "leave"), [("tttsss", (2,), ()), ("ttssss", (), ("node0",))], ids=["2 of 3", "leave"]
    )
    def test_a_host_is_left_with_as_many_instances_as_the_change_under_way_leads_to(self, before, counts, leave):
        """The user wants two of three instances, or one of two stays on its host until others have joined."""
        script = job(before, "node0 node0 node1 node1 node1 node2")
        script.ask_resize(1.0, 7, *counts, leave=leave)
        script.run(2.0)
        if leave:
            script.take_roles(2.0, "tsttss")
        script.at(2.15, InstanceChanged(5, NOTICED))
        script.run(3.0)
        assert script.said(Level.WARN) == ["host node2 is about to go away; other hosts take over from it"]
        assert {wanted.count for _, wanted in wishes(script)[-6:]} == {2}

    def test_all_programs_save_and_leave_if_a_host_that_gets_a_notice_cannot_be_left(self):
        script = job("tts", "node0 node1 node0", least=3)
        script.at(1.0, InstanceChanged(1, NOTICED))
        script.run(2.0)
        assert wishes(script) == []
        assert script.all_of(PASS_ON) == [AgentOrder(PASS_ON, index, signal.SIGUSR1) for index in (0, 1)]
        [said] = script.said(Level.WARN)
        assert "host node1 cannot be left: 2 instances would be active, and --min-instances is 3; all" in said

    def test_spares_are_barred_without_a_change(self):
        script = job("ts", "node0 node1")
        script.ask_resize(1.0, 7, leave=("node1",))
        script.run(2.0)
        assert wishes(script) == [(0, Wanted(1, 1)), (1, Wanted(1, 1, is_barred=True))]
        assert answers(script) == [(7, True, "1 -> 1 instance: nothing to change")]


@pytest.mark.parametrize(
    ("across", "counts", "leave", "reason"),
    [
        ({"least": 0}, (1,), (), "the job cannot be resized, because it was not started with --spares"),
        ({"spares": 0}, (1,), (), "the job cannot be resized, because it was not started with --spares"),
        ({"least": 2}, (1,), (), "1 instance would be active, and --min-instances is 2"),
        ({}, (4,), (), "2 active instances and 1 spare; ask for at most 3, or start the job with more --spares"),
        ({"replicas": 2}, (3,), (), "3 instances cannot share 2 replicas; ask for at most 2"),
        ({}, (2,), ("node7",), "no instance of the job is on host node7; its hosts are node0"),
        ({}, (), ("node0",), "0 instances would be active"),
    ],
)
def test_a_request_that_cannot_be_fulfilled_is_refused_with_the_reason(across, counts, leave, reason):
    script = job("tts", **across)
    script.ask_resize(1.0, 7, *counts, leave=leave)
    script.run(2.0)
    [(asker, is_done, text)] = answers(script)
    assert (asker, is_done) == (7, False)
    assert reason in text
    assert wishes(script) == []


def test_a_job_whose_program_needs_all_instances_is_not_resized():
    script = job("ff")
    script.ask_resize(1.0, 7, 1)
    script.run(2.0)
    assert answers(script) == [
        (7, False, "the job cannot be resized: its program needs all instances, as a warning at its begin says")
    ]


def test_a_job_is_not_resized_before_its_instances_are_connected_or_after_they_have_finished():
    script = Script(2, least=1, spares=1)
    script.ask_resize(0.5, 7, 1)
    script.take_roles(1.0, "tt")
    script.note(2.0, 0, leaving())
    script.note(2.0, 1, leaving())
    script.ask_resize(3.0, 8, 1)
    script.run(4.0)
    assert [text.partition(",")[0] for _, _, text in answers(script)] == ["the job cannot be resized now"] * 2


def test_the_numbers_of_wishes_begin_again_after_the_last():
    assert [number_after(number) for number in (0, 1, MOST_NUMBER)] == [1, 2, 1]
    largest = Wanted(MOST_NUMBER, MOST_INSTANCES, is_barred=True, is_complete=True)
    assert Wanted.unpack(largest.pack()) == largest
    assert largest.pack() < 1 << 32


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b'{"version": 2, "count": 1, "leave": [], "use": []}',
        b'{"version": 1, "count": "1", "leave": [], "use": []}',
        b'{"version": 1, "count": -1, "leave": [], "use": []}',
        b'{"version": 1, "count": true, "leave": [], "use": []}',
        b'{"version": 1, "count": 1, "leave": "node1", "use": []}',
        b'{"version": 1, "count": 1, "leave": [1], "use": []}',
    ],
)
def test_damaged_messages_are_refused(data):
    request, answer = ResizeRequest(3, ("node1",), ("node2",)), ResizeAnswer(True, "2 -> 3 instances")
    assert ResizeRequest.unpack(request.pack()) == request
    assert ResizeAnswer.unpack(answer.pack()) == answer
    with pytest.raises(ValueError, match="resize|request"):
        ResizeRequest.unpack(data)
    with pytest.raises(ValueError, match="resize|answer"):
        ResizeAnswer.unpack(data)


def words_of(text: str) -> ResizeWords:
    found = read_words(text.split())
    assert found is not None
    return found


def test_words_of_the_command_may_come_in_any_order():
    assert words_of("4242 3") == ResizeWords(4242, ResizeRequest(3))
    assert words_of("--timeout 5 4242 --leave-host node[0-1] 3 --leave-host=node7") == ResizeWords(
        4242, ResizeRequest(3, ("node0", "node1", "node7")), 5.0
    )
    assert words_of("4242 --use-host node0").request == ResizeRequest(0, (), ("node0",))
    with pytest.raises(SystemExit, match="^0$"):
        read_words(["4242", "--help"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "needs a job and the number of active instances"),
        ("4242", "needs a job and the number of active instances"),
        ("4242 3 4", "needs a job and the number of active instances"),
        ("train 3", "the job is 'train'; name it by the pid of its poprun"),
        ("4242 0", "the number of active instances is '0'; give a whole number, 1 or more"),
        ("4242 -3", "unknown option -3"),
        ("4242 3 --timeout soon", "--timeout"),
    ],
)
def test_wrong_words_are_refused(text, reason):
    with pytest.raises(UsageError, match=re.escape(reason)):
        read_words(text.split())
