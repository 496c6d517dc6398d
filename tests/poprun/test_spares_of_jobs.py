"""The decisions of poprun about spares: their hosts and cores, and who takes the place of a lost instance."""

from __future__ import annotations

import signal

import pytest
from job_scripts import (
    BEGIN_S,
    PASS_ON,
    RELEASE,
    STOP,
    Script,
    exited,
    inside,
    joining,
    killed,
    leaving,
    running,
)

from popdist.records.progress import ProgressRecord, Role
from popdist.records.wanted import Wanted
from poprun.cli.log import Level
from poprun.cli.settings import LaunchSettings
from poprun.errors import UsageError
from poprun.hosts.hosts import Host
from poprun.hosts.spares import add_hosts, share_hosts
from poprun.hosts.this_machine import Core
from poprun.ipc.facts import Carriers, Loss
from poprun.launch.placement import place_instances
from poprun.launch.variables import popdist_variables
from poprun.monitor.snapshot import SPARE, Recent, look_at_all
from poprun.supervisor.diagnosis import SPARE_END_S
from poprun.supervisor.job_events import (
    CLOSE_LIMIT_S,
    INTERRUPT_GRACE_S,
    LOOK_S,
    SPARE_LIMIT_S,
    AgentOrder,
)


def settings(instances: int, spares: int, **others) -> LaunchSettings:
    others = {"num_replicas": instances, "on_failure": "replace" if spares else "stop"} | others
    return LaunchSettings(("p",), num_instances=instances, spares=spares, **others)


def hosts(*slots: int | None) -> list[Host]:
    return [Host(f"node{index}", number) for index, number in enumerate(slots)]


class TestHosts:
    @pytest.mark.parametrize(
        ("slots", "instances", "spares", "expected"),
        [
            ([None], 4, 2, ((4,), (2,))),
            ([None] * 2, 4, 1, ((2, 2), (0, 1))),
            ([None] * 2, 4, 3, ((2, 2), (1, 2))),
            ([None] * 3, 4, 2, ((2, 2, 0), (0, 0, 2))),
            ([None] * 5, 4, 1, ((1, 1, 1, 1, 0), (0, 0, 0, 0, 1))),
            ([None] * 4, 2, 2, ((1, 1, 0, 0), (0, 0, 1, 1))),
            ([2, 2, 2], 4, 2, ((2, 2, 0), (0, 0, 2))),
            ([2, 2, 2], 5, 1, ((2, 2, 1), (0, 0, 1))),
            ([3, 2], 4, 1, ((2, 2), (1, 0))),
            ([2, 3, 3], 6, 2, ((2, 2, 2), (0, 1, 1))),
        ],
    )
    def test_spares_go_to_the_hosts_with_the_fewest_processes_and_the_last_ones_first(
        self, slots, instances, spares, expected
    ):
        assert share_hosts(hosts(*slots), settings(instances, spares)) == expected

    def test_spares_need_slots_unless_they_share_cores(self):
        with pytest.raises(UsageError) as refused:
            share_hosts(hosts(2, 3), settings(4, 2))
        assert str(refused.value) == (
            "the hosts have 5 slots, but 4 instances and 2 spares are asked for: use 1 spare (--spares), give the "
            "hosts more slots, or let spares need none (--spares-oversubscribe yes)"
        )
        assert share_hosts(hosts(2, 2), settings(4, 2, spares_oversubscribe=True)) == ((2, 2), (1, 1))

    def test_hosts_that_cannot_share_the_instances_are_refused_as_without_spares(self):
        with pytest.raises(UsageError, match="asked for 5 instances on 3 hosts; instances must divide evenly"):
            share_hosts(hosts(None, None, None), settings(5, 1))

    def test_unused_hosts_of_an_allocation_get_spares_first(self):
        available = hosts(2, 2, 2, 2)
        assert add_hosts(available[:2], available, settings(4, 1)) == tuple(available[:3])
        assert add_hosts(available[:2], available, settings(4, 3)) == tuple(available)
        assert add_hosts(available, available, settings(8, 3)) == tuple(available)


class TestPlaces:
    CORES = tuple(Core(0, 0, number, number) for number in range(6))

    def places(self, wanted: LaunchSettings, names: str, shares=(), spares=()):
        return place_instances(wanted, names.split(), dict.fromkeys(names.split(), self.CORES), (), shares, spares)

    def test_a_spare_has_cores_of_its_own(self):
        places = self.places(settings(2, 1), "a", (2,), (1,))
        assert [place.cpus for place in places] == [(0, 1), (2, 3), (4, 5)]
        assert [place.is_spare for place in places] == [False, False, True]

    def test_a_spare_that_shares_cores_may_run_anywhere(self):
        places = self.places(settings(2, 1, spares_oversubscribe=True), "a", (2,), (1,))
        assert [place.cpus for place in places] == [(0, 1, 2), (3, 4, 5), ()]

    def test_spares_follow_all_instances_and_are_counted_on_their_hosts(self):
        places = self.places(settings(4, 3, num_replicas=8), "a b", (2, 2), (1, 2))
        assert [(place.index, place.host, place.local_index) for place in places[4:]] == [
            (4, "a", 2),
            (5, "b", 2),
            (6, "b", 3),
        ]
        assert {place.replicas for place in places[4:]} == {range(6, 8)}

    def test_the_variables_of_a_spare_are_those_of_the_last_instance(self):
        wanted = settings(2, 1, num_replicas=6)
        first, last, spare = (popdist_variables(wanted, each) for each in self.places(wanted, "a", (2,), (1,)))
        assert first["POPDIST_NUM_SPARES"] == last["POPDIST_NUM_SPARES"] == "1"
        assert "POPDIST_SPARE" not in first.keys() | last.keys()
        assert spare == last | {"POPDIST_SPARE": "1", "POPDIST_LOCAL_INSTANCE_INDEX": "2"}
        assert (
            not {"POPDIST_NUM_SPARES", "POPDIST_SPARE"}
            & popdist_variables(settings(2, 0), self.places(settings(2, 0), "a")[0]).keys()
        )


def job(instances: int, spares: int, **more) -> Script:
    """Return a script of instances that train and spares that sleep; all have joined."""
    script = Script(instances + spares, spares=spares, replicas=2 * instances, **{"least": 1, **more})
    for each in script.instances:
        each.record = running()
    return script


def complete(script: Script, at_s: float, *instances: int) -> None:
    for index in instances:
        script.end(at_s, index, exited())


class TestSleepingSpares:
    def test_a_job_ends_when_its_spares_have_ended_after_the_instances(self):
        script = job(2, 1)
        complete(script, 2.0, 0, 1)
        script.end(2.5, 2, exited())
        script.run()
        assert (script.exit_status, script.closed_s) == (0, pytest.approx(2.5))
        assert script.said(Level.WARN) == script.said() == []

    def test_a_spare_that_does_not_end_is_ended_without_a_word(self):
        script = job(2, 1)
        complete(script, 2.0, 0, 1)
        script.run()
        assert (script.exit_status, script.closed_s) == (0, pytest.approx(2.0 + SPARE_LIMIT_S))
        assert script.said(Level.WARN) == []

    @pytest.mark.parametrize("ending", [killed(), exited(1), killed(signal.SIGSEGV)], ids=["SIGKILL", "1", "SIGSEGV"])
    def test_the_loss_of_a_spare_is_a_warning_and_disturbs_nobody(self, ending):
        script = job(2, 2)
        script.end(1.0, 3, ending)
        script.note(5.0, 0, leaving(since_s=5.0))
        script.note(6.0, 1, leaving(since_s=6.0))
        complete(script, 9.0, 0, 1, 2)
        script.run()
        assert script.exit_status == 0
        released = [(at_s, each) for at_s, each in script.done if each in script.all_of(RELEASE)]
        assert [each for _, each in released] == [AgentOrder(RELEASE, index, 1) for index in (0, 1, 2)]
        assert all(6.0 < at_s < 6.0 + 2 * LOOK_S for at_s, _ in released)
        lost = f"spare 3 on host node0 (pid 103) {ending.describe()} in step 3, after collective 4, barrier"
        assert script.said(Level.WARN) == [
            f"{lost}; the job goes on with 1 spare left",
            f"the job completed without 1 spare: {lost}",
        ]
        assert script.machine.losses == [Loss(lost, 3, was_spare=True)]

    def test_instances_that_wait_for_a_lost_spare_are_told(self):
        """Programs that call `popdist.finalizeBackend` do not note their end before."""
        script = job(2, 1)
        script.end(1.0, 2, killed())
        for index in (0, 1):
            script.note(5.0, index, inside(2, since_s=5.0))
        complete(script, 9.0, 0, 1)
        script.run()
        assert [at_s > 5.0 for at_s in script.times_of(RELEASE)] == [True, True]

    def test_a_later_loss_counts_the_lost_spare_too(self):
        script = job(3, 1)
        script.end(1.0, 3, killed())
        script.end(2.0, 1, killed())
        for index in (0, 2):
            script.note(5.0, index, leaving(since_s=5.0))
        complete(script, 9.0, 0, 2)
        script.run()
        assert script.all_of(RELEASE) == [AgentOrder(RELEASE, 0, 2), AgentOrder(RELEASE, 2, 2)]

    def test_a_spare_that_ends_with_0_before_the_job_is_lost(self):
        script = job(2, 1)
        script.end(1.0, 2, exited())
        complete(script, 9.0, 0, 1)
        script.run()
        assert script.exit_status == 0
        assert script.said(Level.WARN)[0] == (
            "spare 2 on host node0 (pid 102) ended with exit status 0 before the end of the job; the job goes on with "
            "no spare left"
        )

    @pytest.mark.parametrize("moment_s", [1.0, 1.0 + SPARE_END_S - LOOK_S])
    def test_a_spare_may_end_a_moment_before_the_instances_note_their_end(self, moment_s):
        script = job(2, 1)
        script.end(1.0, 2, exited())
        script.note(moment_s, 0, leaving(since_s=moment_s))
        complete(script, 60.0, 0, 1)
        script.run()
        assert (script.exit_status, script.said(Level.WARN)) == (0, [])

    def test_a_sleeping_spare_is_not_stuck(self):
        script = job(2, 1, stuck_timeout_s=10.0)
        for index in (0, 1):
            script.note(0.5, index, running(number=9, since_s=1e6))
        complete(script, 500.0, 0, 1)
        script.end(500.0, 2, exited())
        script.run()
        assert (script.exit_status, script.said(Level.WARN)) == (0, [])

    def test_instances_that_wait_at_their_end_do_not_wait_for_spares(self):
        script = job(2, 1, stuck_timeout_s=10.0)
        for index in (0, 1):
            script.note(0.5, index, leaving(since_s=0.5))
        script.run(until_s=60.0)
        assert script.said() == script.said(Level.WARN) == []

    def test_a_stopped_spare_is_given_up(self):
        """Otherwise the next change of the members would wait for the spare."""
        script = job(2, 1, stuck_timeout_s=10.0)
        script.instances[2].is_stopped, script.instances[2].state = True, "T"
        complete(script, 60.0, 0, 1)
        script.run()
        assert script.exit_status == 0
        assert script.said(Level.WARN)[0].startswith(
            "spare 2 on host node0 (pid 102) has made no progress for 10 s (--stuck-timeout-s)"
        )

    def test_a_spare_whose_agent_does_not_answer_is_given_up(self):
        script = job(2, 1, stuck_timeout_s=10.0)
        script.run(until_s=0.5)
        script.instances[2].answers = False
        complete(script, 60.0, 0, 1)
        script.run()
        assert script.exit_status == 0
        assert "spare 2 on host node0 (pid 102) was lost: its supervisor process has not" in script.said(Level.WARN)[0]

    def test_a_spare_that_fails_before_it_has_joined_ends_the_job(self):
        script = job(2, 1)
        for index in (0, 1):
            script.instances[index].record = joining()
        script.instances[2].record = ProgressRecord()
        script.end(1.0, 2, exited(7))
        script.run()
        assert script.exit_status == 7

    def test_a_spare_has_joined_if_the_instances_have(self):
        """The spare was lost before it could report that."""
        script = job(2, 1)
        script.instances[2].record = ProgressRecord()
        script.end(1.0, 2, killed())
        complete(script, 9.0, 0, 1)
        script.run()
        assert script.exit_status == 0
        assert script.said(Level.WARN)[0].endswith("; the job goes on with no spare left")

    def test_the_loss_of_a_spare_s_host_ends_the_job(self):
        script = job(2, 1, hosts="node0 node0 node1", others=("node1",))
        script.run(until_s=0.5)
        script.lose(1.0, 2, fault="Connection timed out")
        script.run()
        assert (script.exit_status, script.verdict.is_of_hosts) == (137, True)


def interrupted_while_saving():
    """Return a job of two instances and a spare, 1 s after its start: SIGTERM has come, and saving takes 19 s."""
    script = job(2, 1)
    script.instances[0].record = script.instances[1].record = running(grace_s=30.0)
    for index in (0, 1):
        script.instances[index].after_signal = (20.0, exited(143))
    script.run(until_s=0.5)
    script.interrupt(1.0, signal.SIGTERM)
    return script


class TestSignals:
    def test_sleeping_spares_get_no_signals_of_the_user(self):
        script = job(2, 1)
        script.run(until_s=0.5)
        script.interrupt(1.0, signal.SIGUSR1)
        script.run(until_s=2.0)
        assert [each.instance for each in script.all_of(PASS_ON)] == [0, 1]

    def test_the_job_ends_after_sigterm_when_the_instances_have_saved(self):
        script = interrupted_while_saving()
        script.run()
        assert (script.exit_status, script.closed_s) == (143, pytest.approx(21.0))
        assert script.said(Level.WARN) == []

    def test_a_spare_that_ends_does_not_shorten_the_time_to_save(self):
        script = interrupted_while_saving()
        script.end(1.5, 2, killed(signal.SIGTERM))
        script.run()
        assert script.closed_s > 1.5 + INTERRUPT_GRACE_S + CLOSE_LIMIT_S
        assert script.exit_status == 143


class TestReplacement:
    def test_a_spare_takes_the_place_of_a_lost_instance(self):
        script = job(3, 1)
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        complete(script, 9.0, 0, 2, 3)
        script.run()
        assert script.exit_status == 0
        lost = "instance 1 on host node0 (pid 101) was killed by SIGKILL in step 3, after collective 4, barrier"
        assert script.said(Level.WARN) == [
            f"{lost}; spare 3 on host node0 takes its place",
            f"the job completed with 1 spare in the place of lost instances: {lost}",
        ]
        assert script.all_of(RELEASE) == [AgentOrder(RELEASE, index, 1) for index in (0, 2, 3)]
        assert script.machine.carriers == [Carriers(0.0, 0, (0, 1, 2)), Carriers(pytest.approx(1.0), 3, (0, 3, 2))]

    def test_the_job_fails_if_the_former_spare_does_not_complete(self):
        script = job(2, 1)
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        complete(script, 9.0, 0)
        script.note(5.0, 0, leaving(since_s=5.0))
        script.end(20.0, 2, exited(5))
        script.run()
        assert script.exit_status == 5

    @pytest.mark.parametrize(
        ("lost", "expected"), [(0, [4]), (1, [4]), (2, [5]), (3, [5])], ids=lambda value: str(value)
    )
    def test_a_spare_of_the_host_with_the_fewest_instances_comes_first(self, lost, expected):
        script = job(4, 2, hosts="node0 node0 node1 node1 node0 node1")
        script.run(until_s=0.5)
        script.end(1.0, lost, killed())
        script.run(until_s=2.0)
        assert [loss.taken_by for loss in script.machine.losses] == expected

    def test_an_instance_at_its_end_takes_no_part_so_more_spares_may_join(self):
        script = job(3, 2)
        script.instances[2].record = leaving()
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        complete(script, 9.0, 0, 2, 3, 4)
        script.run()
        assert script.exit_status == 0
        assert script.machine.carriers[-1].instances == (0, 3, 4)
        assert [(loss.instance, loss.taken_by) for loss in script.machine.losses] == [(1, 3)]

    def test_roles_that_instances_report_count_more_than_what_was_expected(self):
        script = job(2, 2)
        script.take_roles(0.0, "ttss")
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        script.note(1.5, 3, running(role=Role.ACTIVE))
        script.run(until_s=3.0)
        assert [each.instances for each in script.machine.carriers] == [(0, 1), (0, 2), (0, 3)]
        assert script.said(Level.INFO) == ["instance 3 on host node0 (pid 103) has joined"]
        script.end(4.0, 2, killed())
        complete(script, 9.0, 0, 3)
        script.run()
        assert (script.exit_status, script.machine.losses[-1].was_spare) == (0, True)

    def test_an_instance_that_is_not_wanted_becomes_a_spare(self):
        script = job(3, 0)
        script.run(until_s=0.5)
        script.note(1.0, 1, running(role=Role.SPARE))
        script.run(until_s=3.0)
        assert script.machine.carriers[-1].instances == (0, 2)
        script.end(4.0, 0, killed())
        script.run(until_s=5.0)
        assert script.said(Level.WARN)[0].endswith("; spare 1 on host node0 takes its place")
        complete(script, 9.0, 1, 2)
        script.run()
        assert script.exit_status == 0

    def test_two_losses_at_once_and_one_spare(self):
        script = job(4, 1)
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        script.end(1.0, 2, exited(3))
        complete(script, 9.0, 0, 3, 4)
        script.run()
        assert script.exit_status == 0
        first, second, end = script.said(Level.WARN)
        assert first.endswith("; spare 4 on host node0 takes its place")
        assert second.endswith("; instances 0, 3-4 go on without it")
        assert end.startswith("the job completed with 1 spare in the place of lost instances, without 1 instance: ")
        assert script.all_of(RELEASE) == [AgentOrder(RELEASE, index, 2) for index in (0, 3, 4)]

    def test_a_spare_that_is_lost_while_it_joins_is_replaced_too(self):
        script = job(2, 2)
        script.take_roles(0.0, "ttss")
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        script.end(1.05, 2, killed())
        complete(script, 9.0, 0, 3)
        script.run()
        assert script.exit_status == 0
        first, second, end = script.said(Level.WARN)
        assert first.endswith("; spare 2 on host node0 takes its place")
        assert second.startswith("spare 2 on host node0 (pid 102) was killed by SIGKILL")
        assert second.endswith("; spare 3 on host node0 takes its place")
        assert end.startswith("the job completed with 1 spare in the place of lost instances, without 1 spare: ")
        assert script.machine.carriers[-1].instances == (0, 3)

    def test_without_spares_left_the_others_go_on(self):
        script = job(3, 1)
        script.run(until_s=0.5)
        for at_s, index in ((1.0, 1), (2.0, 3), (3.0, 0)):
            script.end(at_s, index, killed())
        complete(script, 9.0, 2)
        script.run()
        assert script.exit_status == 0
        ways = [line.rpartition("; ")[2] for line in script.said(Level.WARN)[:3]]
        assert ways == [
            "spare 3 on host node0 takes its place",
            "instances 0, 2 go on without it",
            "instance 2 goes on without it",
        ]
        assert [loss.followed_by for loss in script.machine.losses] == ["replace", "shrink", "shrink"]

    def test_a_loss_and_the_loss_of_a_spare_at_once(self):
        script = job(2, 2)
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        script.end(1.0, 2, killed())
        complete(script, 9.0, 0, 3)
        script.run()
        ways = [line.rpartition("; ")[2] for line in script.said(Level.WARN)[:2]]
        assert ways == ["spare 3 on host node0 takes its place", "the job goes on with no spare left"]
        assert script.exit_status == 0

    def test_min_instances_counts_active_instances(self):
        script = job(2, 1, least=2)
        script.run(until_s=0.5)
        script.end(1.0, 0, killed())
        script.run(until_s=2.0)
        assert script.said() == []
        script.end(3.0, 1, killed())
        script.run()
        assert script.exit_status == 137
        assert script.said()[-1] == "only 1 instance would be left, and --min-instances is 2: the job ends"

    def test_a_spare_on_a_host_to_be_left_does_not_count_for_min_instances(self):
        script = job(2, 1, least=2)
        script.instances[2].record = running(role=Role.SPARE, wanted=Wanted(1, 2, is_barred=True))
        script.run(until_s=0.5)
        script.end(1.0, 0, killed())
        script.run()
        assert script.exit_status == 137
        assert script.said()[-1] == "only 1 instance would be left, and --min-instances is 2: the job ends"

    @pytest.mark.parametrize("second_s", [1.0, 1.1])
    def test_spares_cannot_go_on_without_any_instance(self, second_s):
        script = job(2, 2)
        script.take_roles(0.0, "ttss")
        script.run(until_s=0.5)
        script.end(1.0, 0, killed())
        script.end(second_s, 1, exited(3))
        script.run()
        assert (script.exit_status, script.verdict.instance) == ((137, 0) if second_s == 1.0 else (3, 1))
        assert script.said()[-1] == "no instance is left that has the variables, and spares have none: the job ends"

    @pytest.mark.parametrize("lacks_values", [True, False])
    def test_a_spare_that_has_joined_and_lacks_the_variables_cannot_go_on_alone(self, lacks_values):
        script = job(2, 1)
        script.take_roles(0.0, "tts")
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        script.note(2.0, 2, running(role=Role.ACTIVE, lacks_values=lacks_values))
        script.end(3.0, 0, killed())
        if lacks_values:
            script.run()
            assert (script.exit_status, script.verdict.instance) == (137, 0)
            assert script.said()[-1] == "no instance is left that has the variables, and spares have none: the job ends"
            return
        complete(script, 4.0, 2)
        script.run()
        assert script.exit_status == 0

    def test_a_spare_for_which_the_others_wait_in_vain_is_given_up(self):
        """The spare was called to replace a lost instance, and ended with status 0 instead."""
        script = job(3, 1)
        script.run(until_s=0.5)
        script.end(1.0, 1, killed())
        script.end(1.1, 3, exited())
        for index in (0, 2):
            script.note(1.1, index, inside(3, since_s=1.1))
            script.note(4.0, index, running(since_s=4.0))
        complete(script, 9.0, 0, 2)
        script.run()
        assert script.exit_status == 0
        assert script.said(Level.WARN)[1].endswith("instances 0, 2 go on without it")
        assert script.all_of(RELEASE)[-2:] == [AgentOrder(RELEASE, 0, 2), AgentOrder(RELEASE, 2, 2)]

    def test_a_stuck_spare_for_which_others_wait_is_examined_and_given_up(self):
        script = job(3, 2, stuck_timeout_s=10.0)
        script.instances[3].state = "S"
        script.run(until_s=0.5)
        for index in (0, 1, 2, 4):
            script.note(1.0, index, inside(3, since_s=1.0))
            script.note(20.0, index, running(since_s=20.0))
        complete(script, 25.0, 0, 1, 2)
        script.end(25.0, 4, exited())
        script.run()
        assert script.exit_status == 0
        said = script.said(Level.WARN)[0]
        assert said.startswith("spare 3 on host node0 (pid 103) has made no progress for 10 s")
        assert said.endswith("; the job goes on with 1 spare left")
        assert [each.instance for each in script.all_of(RELEASE)] == [0, 1, 2, 4]


def test_viewers_see_who_sleeps_and_who_carries_which_replicas():
    script = job(2, 1)
    script.run(until_s=0.5)
    seen = look_at_all(script.machine.facts, Recent(), BEGIN_S + 1.0, (0, 1), 4)
    assert [(each.condition == SPARE, each.replicas) for each in seen] == [
        (False, (0, 1)),
        (False, (2, 3)),
        (True, ()),
    ]
    script.end(1.0, 0, killed())
    script.run(until_s=2.0)
    assert script.machine.carriers[-1].instances == (1, 2)
    assert script.all_of(STOP) == [AgentOrder(STOP, 0)]
