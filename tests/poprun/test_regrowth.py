"""New instances in the places of lost ones: when poprun starts them, where, and when they join."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from job_scripts import BEGIN, WANT_ACTIVE, Script, exited, killed, leaving, running

from popdist.records.progress import Role
from popdist.records.wanted import Wanted
from poprun.cli.log import Level
from poprun.ipc.facts import Facts
from poprun.supervisor.regrowth import choose_reserve

PAUSE_S = 1.0


def job(roles: str, reserves: int, hosts: str = "", most: int = 2) -> Script:
    """Return a job whose last processes are reserves; the processes have had their roles for 0.5 s."""
    spares = roles.count("s")
    script = Script(
        len(roles),
        hosts,
        least=1,
        replicas=12,
        spares=spares,
        reserves=reserves,
        most_new=most,
        first_pause_s=PAUSE_S,
    )
    for index in range(len(roles)):
        script.note(0.1, index, running())
    script.take_roles(0.2, roles)
    return script


def begun(script: Script) -> list[tuple[float, int]]:
    orders = zip(script.times_of(BEGIN), script.all_of(BEGIN), strict=True)
    return [(pytest.approx(at_s, abs=0.3), order.instance) for at_s, order in orders]


def be_ready(script: Script, at_s: float, index: int) -> None:
    script.at(at_s, lambda: script.change_record(index, is_ready=True))


def wishes(script: Script) -> list[Wanted]:
    return [Wanted.unpack(each.number) for each in script.all_of(WANT_ACTIVE)]


def test_a_new_instance_starts_after_a_pause_and_joins_when_it_is_ready():
    script = job("ttss", reserves=2)
    script.end(2.0, 1, killed())
    script.run(2.5)
    assert begun(script) == []
    script.run(4.0)
    assert begun(script) == [(2.0 + PAUSE_S, 2)]
    script.run(9.0)
    assert wishes(script) == []
    be_ready(script, 9.0, 2)
    script.run(10.0)
    assert set(wishes(script)) == {Wanted(1, 2), Wanted(1, 2, is_complete=True)}
    script.take_roles(10.0, "t-ts")
    script.run(11.0)
    assert "instance 2 on host node0 (pid 102) has joined in step 3" in script.said(Level.WARN)
    for index in (0, 2):
        script.end(12.0, index, exited())
    script.end(12.0, 3, exited())
    script.run()
    assert script.exit_status == 0
    assert script.said(Level.WARN)[-1].startswith("the job completed with 1 new instance in the place of lost ones: ")
    assert begun(script) == [(2.0 + PAUSE_S, 2)]


def test_a_spare_takes_the_place_before_a_new_instance_does():
    script = job("ttsss", reserves=2)
    script.end(2.0, 1, killed())
    script.run(9.0)
    assert begun(script) == []
    script.take_roles(9.0, "t-tss")
    script.end(10.0, 2, killed())
    script.run(12.0)
    assert [index for _, index in begun(script)] == [3]


def test_a_new_instance_that_fails_on_its_way_is_followed_by_another_after_twice_the_pause():
    script = job("ttss", reserves=2)
    script.end(2.0, 1, killed())
    script.end(5.0, 2, exited(1))
    script.run(9.0)
    assert begun(script) == [(2.0 + PAUSE_S, 2), (5.0 + 2 * PAUSE_S, 3)]
    script.end(10.0, 3, killed())
    script.run(20.0)
    assert len(begun(script)) == 2
    said = [line for line in script.said(Level.WARN) if "no instance starts" in line]
    assert said == ["no instance starts in the place of the lost one: 2 new instances (--max-restarts)"]


def test_two_lost_instances_get_two_new_ones():
    script = job("tttsss", reserves=3, most=3)
    script.end(2.0, 1, killed())
    script.end(2.1, 2, killed())
    script.run(9.0)
    assert begun(script) == [(2.0 + PAUSE_S, 3), (2.0 + 3 * PAUSE_S, 4)]


def test_a_new_instance_that_fails_after_it_has_joined_is_followed_by_another():
    script = job("ttss", reserves=2)
    script.end(2.0, 1, killed())
    be_ready(script, 4.0, 2)
    script.run(5.0)
    script.take_roles(5.0, "t-ts")
    script.end(6.0, 2, killed())
    script.run(9.0)
    assert begun(script) == [(2.0 + PAUSE_S, 2), (6.0 + 2 * PAUSE_S, 3)]
    assert [index for index, each in enumerate(script.machine.facts) if each.is_given_up] == [1, 2]


def test_an_instance_lost_while_a_new_one_is_on_its_way_gets_a_second_one():
    script = job("tttss", reserves=2)
    script.end(2.0, 1, killed())
    script.end(4.0, 2, killed())
    script.run(9.0)
    assert begun(script) == [(2.0 + PAUSE_S, 3), (4.0 + 2 * PAUSE_S, 4)]
    be_ready(script, 9.0, 3)
    script.run(10.0)
    assert wishes(script)[-1] == Wanted(1, 2, is_complete=True)
    script.take_roles(10.0, "t--ts")
    be_ready(script, 11.0, 4)
    script.run(12.0)
    assert wishes(script)[-1] == Wanted(2, 3, is_complete=True)


def test_no_new_instance_starts_on_a_host_that_is_left():
    script = job("tttss", reserves=2, hosts="h0 h1 h1 h0 h1")
    script.ask_resize(1.0, 7, 2, leave=("h0",))
    script.run(2.0)
    script.take_roles(2.0, "sttss")
    script.run(3.0)
    script.end(3.0, 1, killed())
    script.run(9.0)
    assert begun(script) == [(3.0 + PAUSE_S, 4)]
    assert len(set(wishes(script))) == 4  # barred and not, both complete and not


def test_no_more_instances_start_than_the_user_wants_now():
    script = job("ttts", reserves=1)
    script.ask_resize(1.0, 7, 2)
    script.run(2.0)
    script.take_roles(2.0, "ttss")
    script.run(3.0)
    script.end(3.0, 1, killed())
    script.take_roles(3.5, "t-ts")
    script.run(9.0)
    assert begun(script) == []


def test_no_instance_starts_while_the_job_ends():
    script = job("ttss", reserves=2)
    script.end(2.0, 1, killed())
    script.note(2.3, 0, replace(leaving(), role=Role.ACTIVE))
    script.run(9.0)
    assert begun(script) == []


@pytest.mark.parametrize(
    ("active", "failures", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, 5),
        ({"a": 2, "b": 1}, {"b": 1}, 7),
        ({"a": 0, "b": 2}, {"a": 2}, 7),
        ({"a": 1, "b": 1}, {"b": 1}, 7),
        ({"a": 0, "b": 0}, {"a": 2, "b": 2}, 5),
    ],
)
def test_a_new_instance_starts_on_the_host_that_lost_one_unless_it_has_lost_two(active, failures, expected):
    reserves = [Facts(index, host) for index, host in ((5, "a"), (6, "a"), (7, "b"), (8, "b"))]
    there = [Facts(0, host) for host, number in active.items() for _ in range(number)]
    assert choose_reserve(reserves, there, Counter(failures)).index == expected
