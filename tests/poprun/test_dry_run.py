from __future__ import annotations

import json

import pytest

from poprun.cli.settings import Settings
from poprun.hosts.cores import Core
from poprun.hosts.hosts import Host
from poprun.launch.command import Launch
from poprun.launch.dry_run import describe_plan, draw_placement
from poprun.launch.placement import place_instances

FOUR_CORES = [Core(0, 0, 0, 0), Core(0, 0, 1, 1), Core(1, 1, 0, 2), Core(1, 1, 1, 3)]


def plan(*names: str, devices=(), **options) -> Launch:
    settings = Settings(program=("p", "a b"), **options)
    hosts = tuple(Host(name, is_this_machine=name == "here") for name in names)
    places = place_instances(settings, names, dict.fromkeys(names, FOUR_CORES), devices)
    extra = {"PJRT_NPROC": "8"}
    return Launch(settings, hosts, places, "/mpirun", "/python", extra, ("PATH",), oversubscribes=False)


def test_the_table_of_a_job_on_two_hosts():
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
        "The cores of node0, n1 are taken to be like those of this machine.",
        "",
        "environment of all instances:",
        "  POPDIST_NUM_TOTAL_REPLICAS=8",
        "  POPDIST_NUM_IPUS_PER_REPLICA=2",
        "  POPDIST_NUM_LOCAL_REPLICAS=2",
        "  POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=1",
        "  PJRT_NPROC=8",
        "  PATH (forwarded)",
        "  B (forwarded)",
        "environment of instance 0:",
        "  POPDIST_REPLICA_INDEX_OFFSET=0",
        "  POPDIST_LOCAL_INSTANCE_INDEX=0",
        "  POPDIST_DEVICE_ID=24",
        "  A=1",
        "environment of instance 1:",
        "  POPDIST_REPLICA_INDEX_OFFSET=2",
        "  POPDIST_LOCAL_INSTANCE_INDEX=1",
        "  POPDIST_DEVICE_ID=25",
        "  A=1",
        "environment of instance 2:",
        "  POPDIST_REPLICA_INDEX_OFFSET=4",
        "  POPDIST_LOCAL_INSTANCE_INDEX=0",
        "  POPDIST_DEVICE_ID=26",
        "  A=1",
        "environment of instance 3:",
        "  POPDIST_REPLICA_INDEX_OFFSET=6",
        "  POPDIST_LOCAL_INSTANCE_INDEX=1",
        "  POPDIST_DEVICE_ID=27",
        "  A=2",
    ]


def test_a_single_instance_has_its_whole_environment_at_once_and_no_device():
    lines = draw_placement(plan("here")).splitlines()
    assert lines[1].split() == ["0", "here", "any", "any", "0", "0", "-"]
    assert "environment of all instances:" in lines
    assert "environment of instance 0:" not in lines


@pytest.mark.parametrize(("names", "is_said"), [(["here"], False), (["here", "b"], True)])
def test_what_is_assumed_about_other_hosts_is_said(names, is_said):
    text = draw_placement(plan(*names, num_instances=4, num_replicas=4))
    assert ("The cores of b are taken to be like those of this machine." in text) == is_said


def test_nothing_is_assumed_where_nothing_is_pinned():
    assert "taken to be" not in draw_placement(plan("a", "b", num_instances=2, num_replicas=2))


def test_the_plan_says_the_same_in_values_that_json_has():
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
            "PJRT_NPROC": "8",
        },
        "forwarded": ["PATH", "B"],
    }
