from __future__ import annotations

import os

import pytest

from poprun.cores import Core, divide_cores, format_cpus, parse_cpus, usable_cores
from poprun.placement import place_instances
from poprun.settings import Settings


def machine(nodes: int, cores_per_node: int, threads: int = 1) -> list[Core]:
    """CPUs numbered as Linux does it on x86: all first threads, then all second threads."""
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


def settings(instances: int, replicas: int | None = None, **others) -> Settings:
    return Settings(program=("p",), num_instances=instances, num_replicas=replicas or instances, **others)


@pytest.mark.parametrize(("replicas", "instances"), [(8, 1), (8, 2), (6, 3), (7, 7), (12, 4)])
def test_every_replica_belongs_to_one_instance_in_order(replicas, instances):
    places = place_instances(settings(instances, replicas), "h", machine(1, 4))
    assert [place.index for place in places] == list(range(instances))
    assert [replica for place in places for replica in place.replicas] == list(range(replicas))
    assert {len(place.replicas) for place in places} == {replicas // instances}


@pytest.mark.parametrize("instances", [2, 3, 5, 8])
def test_instances_have_disjoint_cores_and_all_are_used(instances):
    places = place_instances(settings(instances), "h", machine(2, 4))
    used = [cpu for place in places for cpu in place.cpus]
    assert sorted(used) == list(range(8))
    sizes = {len(place.cpus) for place in places}
    assert max(sizes) - min(sizes) <= 1


def test_numa_nodes_are_divided_among_instances():
    two_of_four_nodes = place_instances(settings(2), "h", machine(4, 2))
    assert [place.cpus for place in two_of_four_nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    two_on_each_node = place_instances(settings(4), "h", machine(2, 2))
    assert [place.cpus for place in two_on_each_node] == [(0,), (1,), (2,), (3,)]


def test_the_threads_of_a_core_stay_together():
    assert divide_cores(machine(1, 4, threads=2), 2) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_threads_are_divided_only_when_cores_are_too_few():
    assert divide_cores(machine(1, 2, threads=2), 4) == ((0,), (2,), (1,), (3,))


def test_more_instances_than_cores_run_anywhere():
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
def test_nothing_is_pinned_when_there_is_one_instance_or_the_user_arranges_it(unpinned):
    assert {place.cpus for place in place_instances(unpinned, "h", machine(1, 4))} == {()}


def test_this_machine_tells_the_cores_that_may_be_used():
    assert {core.cpu for core in usable_cores()} == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("1,3,5-6", (1, 3, 5, 6)), ("", ())]
)
def test_cpu_lists_are_written_as_the_kernel_writes_them(text, cpus):
    assert format_cpus(cpus) == text
    assert parse_cpus(text) == cpus
