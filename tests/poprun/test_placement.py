from __future__ import annotations

import os

import pytest

from poprun.agent.guard import parse_cpus
from poprun.cli.settings import LaunchSettings
from poprun.cli.wording import list_ranges
from poprun.hosts.this_machine import Core, usable_cores
from poprun.launch.placement import InstancePlace, deal_cores, deal_sockets, divide_cores, place_instances


def machine(nodes: int, cores_per_node: int, threads: int = 1) -> list[Core]:
    """Return CPUs numbered as Linux numbers them on x86: all first threads, then all second threads."""
    total = nodes * cores_per_node
    return sorted(
        Core(
            node=core // cores_per_node,
            package=core // cores_per_node,
            core=core % cores_per_node,
            cpu=core + thread * total,
        )
        for core in range(total)
        for thread in range(threads)
    )


def settings(instances: int, replicas: int | None = None, **others) -> LaunchSettings:
    return LaunchSettings(program=("p",), num_instances=instances, num_replicas=replicas or instances, **others)


def place(settings: LaunchSettings, cores: list[Core], hosts: str = "h", **others) -> tuple[InstancePlace, ...]:
    return place_instances(settings, list(hosts), dict.fromkeys(hosts, cores), **others)


def cpus(blocks) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(core.cpu for core in block)) for block in blocks)


@pytest.mark.parametrize(("replicas", "instances"), [(8, 1), (8, 2), (6, 3), (7, 7), (12, 4)])
def test_every_replica_belongs_to_one_instance_in_order(replicas, instances):
    places = place(settings(instances, replicas), machine(1, 4))
    assert [place.index for place in places] == list(range(instances))
    assert [replica for place in places for replica in place.replicas] == list(range(replicas))
    assert {len(place.replicas) for place in places} == {replicas // instances}


@pytest.mark.parametrize("instances", [2, 3, 5, 8])
def test_instances_have_disjoint_cores_and_all_are_used(instances):
    places = place(settings(instances), machine(2, 4))
    used = [cpu for place in places for cpu in place.cpus]
    assert sorted(used) == list(range(8))
    sizes = {len(place.cpus) for place in places}
    assert max(sizes) - min(sizes) <= 1


def test_numa_nodes_are_divided_among_instances():
    two_of_four_nodes = place(settings(2), machine(4, 2))
    assert [place.cpus for place in two_of_four_nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    two_on_each_node = place(settings(4), machine(2, 2))
    assert [place.cpus for place in two_on_each_node] == [(0,), (1,), (2,), (3,)]


def test_the_threads_of_a_core_stay_together():
    assert cpus(divide_cores(machine(1, 4, threads=2), 2)) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_threads_are_divided_only_if_cores_are_too_few():
    assert cpus(divide_cores(machine(1, 2, threads=2), 4)) == ((0,), (2,), (1,), (3,))


def test_instances_are_not_pinned_if_they_outnumber_the_cores():
    assert divide_cores(machine(1, 2), 3) == ((), (), ())


@pytest.mark.parametrize(
    "unpinned",
    [
        settings(1),
        settings(2, process_placement="disabled"),
        settings(2, mpi_global_args=("--bind-to", "core")),
        settings(2, mpi_local_args=("--cpu-set=0,1",)),
    ],
)
def test_a_single_instance_or_the_users_own_binding_is_not_pinned(unpinned):
    assert {place.cpus for place in place(unpinned, machine(1, 4))} == {()}


def test_usable_cores_are_the_affinity_of_the_process():
    assert {core.cpu for core in usable_cores()} == os.sched_getaffinity(0)


@pytest.mark.parametrize(("text", "numbers"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("1,3,5-6", (1, 3, 5, 6))])
def test_cpu_lists_have_the_format_of_the_kernel(text, numbers):
    assert list_ranges(numbers) == text
    assert parse_cpus(text) == numbers


@pytest.mark.parametrize(
    ("instances", "hosts", "wanted"),
    [
        (1, "a", "a0"),
        (3, "a", "a0 a1 a2"),
        (4, "ab", "a0 a1 b0 b1"),
        (6, "cab", "c0 c1 a0 a1 b0 b1"),
        (3, "abc", "a0 b0 c0"),
    ],
)
def test_hosts_get_equal_blocks_of_instances_in_their_order(instances, hosts, wanted):
    places = place(settings(instances), machine(1, 2), hosts)
    assert " ".join(f"{each.host}{each.local_index}" for each in places) == wanted
    assert [each.index for each in places] == list(range(instances))


def test_hosts_accept_blocks_of_different_lengths():
    places = place(settings(6, 12), machine(1, 4), "abc", shares=(4, 1, 1))
    assert " ".join(f"{each.host}{each.local_index}" for each in places) == "a0 a1 a2 a3 b0 c0"
    assert [each.index for each in places] == list(range(6))
    assert [replica for each in places for replica in each.replicas] == list(range(12))
    assert [each.cpus for each in places] == [(0,), (1,), (2,), (3,), (), ()]


@pytest.mark.parametrize("instances", [4, 6, 12])
@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_a_ring_crosses_the_link_of_each_host_once(instances, hosts):
    places = place(settings(instances), machine(1, 2), hosts)
    leaving = [one.host for one, other in zip(places, places[1:] + places[:1], strict=True) if one.host != other.host]
    assert sorted(leaving) == ([] if hosts == "a" else list(hosts))


def test_every_host_is_divided_by_its_own_cores():
    cores = {"a": machine(1, 4), "b": machine(2, 1)}
    places = place_instances(settings(4), ["a", "b"], cores)
    assert [each.cpus for each in places] == [(0, 1), (2, 3), (0,), (1,)]
    assert [each.nodes for each in places] == [(0,), (0,), (0,), (1,)]


def test_a_host_with_a_single_instance_is_not_pinned():
    assert {each.cpus for each in place(settings(2), machine(1, 4), "ab")} == {()}


def test_only_a_host_with_too_few_cores_is_not_pinned():
    cores = {"a": machine(1, 1), "b": machine(1, 2)}
    assert [each.cpus for each in place_instances(settings(4), ["a", "b"], cores)] == [(), (), (0,), (1,)]


@pytest.mark.parametrize(("instances", "domains"), [(4, [0, 0, 1, 1]), (2, [0, 1]), (6, [0, 0, 0, 1, 1, 1])])
def test_ilds_get_equal_blocks_of_instances(instances, domains):
    places = place(settings(instances, num_ilds=2), machine(1, 2), "ab")
    assert [each.domain for each in places] == domains


def test_an_ild_may_cross_a_host_boundary():
    places = place(settings(6, num_ilds=3), machine(1, 2), "ab")
    assert [(each.host, each.domain) for each in places] == list(zip("aaabbb", (0, 0, 1, 1, 2, 2), strict=True))


def test_devices_are_assigned_in_order():
    assert [each.device for each in place(settings(2), machine(1, 2), "ab", devices=(7, 3))] == [7, 3]
    assert {each.device for each in place(settings(2), machine(1, 2), "ab")} == {None}


class TestOtherStrategies:
    def test_cores_gives_each_instance_one_core_in_turn(self):
        places = place(settings(2, process_placement="cores"), machine(2, 2, threads=2))
        assert [each.cpus for each in places] == [(0, 4), (1, 5)]

    def test_cores_pins_a_single_instance(self):
        assert place(settings(1, process_placement="cores"), machine(1, 2))[0].cpus == (0,)

    @pytest.mark.parametrize(("count", "wanted"), [(3, ((0,), (2,), (1,))), (5, ((),) * 5)])
    def test_threads_are_dealt_if_cores_are_too_few_and_nothing_if_threads_are_too_few(self, count, wanted):
        assert cpus(deal_cores(machine(1, 2, threads=2), count)) == wanted

    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    def test_sockets_gives_whole_processors_in_turn(self, count):
        assert cpus(deal_sockets(machine(2, 2), count)) == tuple([(0, 1), (2, 3)][index % 2] for index in range(count))

    @pytest.mark.parametrize("strategy", ["cores", "sockets"])
    def test_the_users_binding_wins(self, strategy):
        bound = settings(2, process_placement=strategy, instance_mpi_local_args=((0, ("--bind-to", "core")),))
        assert {each.cpus for each in place(bound, machine(2, 2))} == {()}
