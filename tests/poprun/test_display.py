from __future__ import annotations

import json

import pytest

from poprun.cli.settings import LaunchSettings
from poprun.hosts.hosts import Host
from poprun.hosts.this_machine import Core
from poprun.launch.display import describe_plan, draw_placement, draw_topology
from poprun.launch.launch import Launch
from poprun.launch.placement import InstancePlace, place_instances


def places(instances: int, replicas: int, host: str) -> list[InstancePlace]:
    local = replicas // instances
    return [InstancePlace(i, host, i, range(i * local, (i + 1) * local)) for i in range(instances)]


def test_the_topology_equals_the_first_public_sample():
    assert draw_topology(places(2, 2, "a-long-host-name")).splitlines() == [
        " ===================",
        "|  poprun topology  |",
        "|===================|",
        "| hosts     |  [0]  |",
        "|-----------|-------|",
        "| ILDs      |   0   |",
        "|-----------|-------|",
        "| instances | 0 | 1 |",
        "|-----------|-------|",
        "| replicas  | 0 | 1 |",
        " -------------------",
        " [0] = a-long-host-name",
    ]


def test_the_topology_equals_the_second_public_sample():
    assert draw_topology(places(1, 4, "gc-poplar-02")).splitlines() == [
        " ===========================",
        "|      poprun topology      |",
        "|===========================|",
        "| hosts     | gc-poplar-02  |",
        "|-----------|---------------|",
        "| ILDs      |       0       |",
        "|-----------|---------------|",
        "| instances |       0       |",
        "|-----------|---------------|",
        "| replicas  | 0 | 1 | 2 | 3 |",
        " ---------------------------",
    ]


def test_cells_are_as_wide_as_the_widest_index():
    lines = draw_topology(places(4, 12, "node")).splitlines()
    assert lines[9] == "| replicas  | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  | 8  | 9  | 10 | 11 |"
    assert lines[7] == "| instances |      0       |      1       |      2       |      3       |"
    assert {len(line) for line in lines[1:-1]} == {len(lines[0]) + 1}


@pytest.mark.parametrize("columns", [80, 60, 20])
def test_a_topology_wider_than_the_page_is_split_into_tables(columns):
    lines = draw_topology(places(4, 40, "a-long-name" * 9), columns).splitlines()
    assert max(map(len, lines[:-1])) <= max(columns, 20)
    cells = [cell.strip() for line in lines if "replicas" in line for cell in line.split("|")[2:-1]]
    assert cells == [str(replica) for replica in range(40)]
    assert [line for line in lines if " = " in line] == [f" [0] = {'a-long-name' * 9}"]


def test_tables_are_split_between_instances_if_one_fits():
    lines = draw_topology(places(4, 40, "node"), 80).splitlines()
    assert [line.split("|")[2].strip() for line in lines if "instances" in line] == ["0", "1", "2", "3"]


def test_hosts_span_their_replicas():
    two_hosts = [InstancePlace(0, "a", 0, range(0, 2)), InstancePlace(1, "b", 0, range(2, 4))]
    assert draw_topology(two_hosts).splitlines()[3] == "| hosts     |   a   |   b   |"


def test_a_host_whose_name_is_too_long_is_explained_below():
    lines = draw_topology(places(1, 1, "node")).splitlines()
    assert lines[3] == "| hosts     |[0]|"
    assert lines[-1] == " [0] = node"


def many(instances: int, replicas: int, hosts: list[str], domains: int = 1) -> list[InstancePlace]:
    local, share = replicas // instances, instances // len(hosts)
    return [
        InstancePlace(
            i, hosts[i // share], i % share, range(i * local, (i + 1) * local), domain=i * domains // instances
        )
        for i in range(instances)
    ]


def test_hosts_domains_and_instances_are_centred_over_their_replicas():
    assert draw_topology(many(4, 8, ["node0", "node1"], domains=2)).splitlines() == [
        " ===========================================",
        "|              poprun topology              |",
        "|===========================================|",
        "| hosts     |     node0     |     node1     |",
        "|-----------|-------------------------------|",
        "| ILDs      |       0       |       1       |",
        "|-----------|-------------------------------|",
        "| instances |   0   |   1   |   2   |   3   |",
        "|-----------|-------------------------------|",
        "| replicas  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |",
        " -------------------------------------------",
    ]


def test_an_ild_may_span_hosts():
    lines = draw_topology(many(6, 6, ["a", "b"], domains=3)).splitlines()
    assert lines[3] == "| hosts     |     a     |     b     |"
    assert lines[5] == "| ILDs      |   0   |   1   |   2   |"


def test_only_host_names_that_are_too_long_are_explained_below():
    uneven = [
        InstancePlace(0, "abcd", 0, range(0, 1)),
        InstancePlace(1, "a-long-name", 0, range(1, 2)),
        InstancePlace(2, "c", 0, range(2, 3)),
    ]
    lines = draw_topology(uneven).splitlines()
    assert lines[3] == "| hosts     |[0]|[1]| c |"
    assert lines[-2:] == [" [0] = abcd", " [1] = a-long-name"]


def test_a_name_may_fill_its_span():
    hosts = [
        InstancePlace(0, "vm", 0, range(0, 1)),
        InstancePlace(1, "abc", 0, range(1, 2)),
        InstancePlace(2, "abcdefg", 0, range(2, 4)),
    ]
    lines = draw_topology(hosts).splitlines()
    assert lines[3] == "| hosts     |vm |abc|abcdefg|"
    assert len(lines) == 11


def test_the_index_of_a_host_fits_for_any_number_of_hosts():
    lines = draw_topology(many(12, 12, [f"node{i:02}" for i in range(12)])).splitlines()
    assert lines[3].endswith("|[9] |[10]|[11]|")
    assert {len(line) for line in lines[1:10]} == {len(lines[0]) + 1}


FOUR_CORES = [Core(0, 0, 0, 0), Core(0, 0, 1, 1), Core(1, 1, 0, 2), Core(1, 1, 1, 3)]


def plan(*names: str, devices=(), **options) -> Launch:
    settings = LaunchSettings(program=("p", "a b"), **options)
    hosts = tuple(Host(name, is_this_machine=name == "here") for name in names)
    places = place_instances(settings, names, dict.fromkeys(names, FOUR_CORES), devices)
    extra = {"PJRT_NPROC": "8"}
    return Launch(settings, hosts, places, "/mpirun", "/python", extra, ("PATH",), oversubscribes=False)


def test_the_placement_table_shows_a_job_on_two_hosts():
    launch = plan(
        *("node0", "n1"),
        devices=(24, 25, 26, 27),
        num_instances=4,
        num_replicas=8,
        ipus_per_replica=2,
        mpi_local_args=("-x", "A=1", "-x", "B"),
        instance_mpi_local_args=((3, ("-x", "A=2")),),
    )
    assert draw_placement(launch).splitlines() == [
        "instance  host   cores  NUMA  replicas  IPUs   device",
        "0         node0  0-1    0     0-1       0-3    24",
        "1         node0  2-3    1     2-3       4-7    25",
        "2         n1     0-1    0     4-5       8-11   26",
        "3         n1     2-3    1     6-7       12-15  27",
        "The cores of node0, n1 are assumed to be like those of this machine.",
        "",
        "environment of all instances:",
        "  POPDIST_NUM_TOTAL_REPLICAS=8",
        "  POPDIST_NUM_IPUS_PER_REPLICA=2",
        "  POPDIST_NUM_LOCAL_REPLICAS=2",
        "  POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=1",
        "  WORLD_SIZE=4",
        "  LOCAL_WORLD_SIZE=2",
        "  PJRT_NPROC=8",
        "  PATH (forwarded)",
        "  B (forwarded)",
        "environment of instance 0:",
        "  POPDIST_REPLICA_INDEX_OFFSET=0",
        "  POPDIST_LOCAL_INSTANCE_INDEX=0",
        "  POPDIST_DEVICE_ID=24",
        "  RANK=0",
        "  LOCAL_RANK=0",
        "  GROUP_RANK=0",
        "  NODE_RANK=0",
        "  A=1",
        "environment of instance 1:",
        "  POPDIST_REPLICA_INDEX_OFFSET=2",
        "  POPDIST_LOCAL_INSTANCE_INDEX=1",
        "  POPDIST_DEVICE_ID=25",
        "  RANK=1",
        "  LOCAL_RANK=1",
        "  GROUP_RANK=0",
        "  NODE_RANK=0",
        "  A=1",
        "environment of instance 2:",
        "  POPDIST_REPLICA_INDEX_OFFSET=4",
        "  POPDIST_LOCAL_INSTANCE_INDEX=0",
        "  POPDIST_DEVICE_ID=26",
        "  RANK=2",
        "  LOCAL_RANK=0",
        "  GROUP_RANK=1",
        "  NODE_RANK=1",
        "  A=1",
        "environment of instance 3:",
        "  POPDIST_REPLICA_INDEX_OFFSET=6",
        "  POPDIST_LOCAL_INSTANCE_INDEX=1",
        "  POPDIST_DEVICE_ID=27",
        "  RANK=3",
        "  LOCAL_RANK=1",
        "  GROUP_RANK=1",
        "  NODE_RANK=1",
        "  A=2",
    ]


def test_a_single_instance_gets_one_block_of_environment_and_no_device():
    lines = draw_placement(plan("here")).splitlines()
    assert lines[1].split() == ["0", "here", "any", "any", "0", "0", "-"]
    assert "environment of all instances:" in lines
    assert "environment of instance 0:" not in lines


@pytest.mark.parametrize(("names", "is_said"), [(["here"], False), (["here", "b"], True)])
def test_assumptions_about_remote_hosts_are_shown(names, is_said):
    text = draw_placement(plan(*names, num_instances=4, num_replicas=4))
    assert ("The cores of b are assumed to be like those of this machine." in text) == is_said


def test_no_assumption_is_shown_if_no_instance_is_pinned():
    assert "taken to be" not in draw_placement(plan("a", "b", num_instances=2, num_replicas=2))


def test_the_plan_as_json_holds_the_same_facts():
    launch = plan("here", "b", num_instances=2, num_replicas=4, num_ilds=2, devices=(2, 3), mpi_local_args=("-x", "B"))
    described = describe_plan(launch, ["mpirun", "x"])
    assert json.loads(json.dumps(described)) == described
    assert described["hosts"] == [
        {"name": "here", "slots": None, "is_this_machine": True},
        {"name": "b", "slots": None, "is_this_machine": False},
    ]
    assert described["command"] == ["mpirun", "x"]
    assert described["program"] == ["p", "a b"]
    assert (described["num_instances"], described["num_replicas"], described["num_ilds"]) == (2, 4, 2)
    assert described["instances"][1] == {
        "index": 1,
        "host": "b",
        "local_index": 0,
        "ild": 1,
        "replicas": [2, 3],
        "ipus": [2, 3],
        "device": 3,
        "cpus": [],
        "numa_nodes": [],
        "environment": {
            "POPDIST_NUM_TOTAL_REPLICAS": "4",
            "POPDIST_NUM_IPUS_PER_REPLICA": "1",
            "POPDIST_NUM_LOCAL_REPLICAS": "2",
            "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
            "POPDIST_REPLICA_INDEX_OFFSET": "2",
            "POPDIST_LOCAL_INSTANCE_INDEX": "0",
            "POPDIST_DEVICE_ID": "3",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "1",
            "NODE_RANK": "1",
            "PJRT_NPROC": "8",
        },
        "forwarded": ["PATH", "B"],
    }
