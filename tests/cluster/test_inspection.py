"""The inspection of hosts before a launch, over real ssh."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from beds import open_bed

pytestmark = [pytest.mark.cluster, pytest.mark.complete]

INSPECT = """
import json, os, sys
from dataclasses import asdict, replace
from poprun.hosts.inspection import Inspection, inspect_hosts
from poprun.errors import PopRunError
from poprun.hosts.host_facts import question_about

hosts, changes = json.loads(sys.argv[1]), json.loads(sys.argv[2])
question = question_about(changes.pop("program", sys.executable), "mpirun", os.environ)
question = replace(question, **changes.pop("question", {}))
inspection = Inspection(dict.fromkeys(hosts, 1), question, **changes)
try:
    found = inspect_hosts(inspection, os.environ)
except PopRunError as error:
    print(json.dumps({"lines": str(error).splitlines()}))
else:
    print(json.dumps({
        "lines": [],
        "warnings": found.warnings,
        "network": asdict(found.network),
        "names": [each.name for each in found.facts.values()],
        "cached": [each.is_cached for each in found.facts.values()],
    }))
"""


def inspect(bed, hosts, environ=None, **changes):
    """Inspect the hosts from h0."""
    done = bed.python("h0", INSPECT, json.dumps(list(hosts)), json.dumps(changes), **(environ or {}))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ssh_with(bed, *words):
    return {"POPRUN_SSH_ARGS": shlex.join([*words, *bed.ssh_arguments])}


@pytest.fixture
def fresh(hosts, tmp_path_factory):
    """Provide the hosts, with an empty cache."""
    before = hosts.environ["XDG_CACHE_HOME"]
    hosts.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield hosts
    hosts.environ["XDG_CACHE_HOME"] = before


def test_hosts_in_good_order_are_described_and_their_network_is_found(fresh):
    found = inspect(fresh, fresh.names)
    assert found["lines"] == []
    assert found["names"] == list(fresh.names)
    assert found["network"] == {"cidr": "10.77.0.0/24", "address": "10.77.0.10", "interface": "eth0"}


def test_the_launching_machine_need_not_take_part(fresh):
    found = inspect(fresh, ["h2", "h1"])
    assert (found["lines"], found["names"]) == ([], ["h2", "h1"])


def test_a_second_launch_uses_the_cache_and_no_ssh(fresh):
    assert inspect(fresh, ["h0", "h1"])["cached"] == [False, False]
    fresh.link("h1", "down")
    assert inspect(fresh, ["h0", "h1"])["cached"] == [True, True]


def test_cached_facts_never_refuse_a_launch(fresh):
    make = ("sh", "-c", "echo true > /tmp/late.sh; chmod +x /tmp/late.sh")
    fresh.on("h0", *make)
    assert len(inspect(fresh, ["h0", "h1"], program="/tmp/late.sh")["lines"]) == 1
    fresh.on("h1", *make)
    assert inspect(fresh, ["h0", "h1"], program="/tmp/late.sh")["lines"] == []


def test_a_wrong_host_name_is_refused_long_before_the_limit(fresh):
    """The limit is longer than the test may take."""
    (line,) = inspect(fresh, ["h0", "h1", "hh"], {"POPRUN_CHECK_TIMEOUT_S": "1000"})["lines"]
    assert line.startswith("host hh: ")
    assert "hh" in line.removeprefix("host hh: ")


@pytest.mark.parametrize(
    ("words", "fact", "way_out"),
    [
        (["-o", "PubkeyAuthentication=no"], "Permission denied (publickey)", "ssh-copy-id h1"),
        (["-o", "UserKnownHostsFile=/dev/null"], "Host key verification failed.", "ssh-keyscan h1"),
        (["-p", "2223"], "ssh: connect to host h1 port 2223: Connection refused", "start sshd there"),
    ],
)
def test_a_refusal_of_ssh_is_explained_in_its_own_words(fresh, words, fact, way_out):
    (line,) = inspect(fresh, ["h0", "h1"], ssh_with(fresh, *words))["lines"]
    assert line.startswith("host h1: ")
    assert fact in line
    assert way_out in line


def test_a_host_with_a_cut_link_is_named(fresh):
    fresh.link("h3", "down")
    (line,) = inspect(fresh, fresh.names)["lines"]
    assert line.startswith("host h3: ssh: connect to host h3 port 2222: ")


@pytest.fixture
def parted(fresh):
    """Provide hosts of which h1 and h2 cannot connect to each other; h0 reaches both."""
    fresh.on("h1", "ip", "route", "add", "blackhole", "10.77.0.12/32")
    yield fresh
    fresh.on("h1", "ip", "route", "del", "blackhole", "10.77.0.12/32")


def test_hosts_that_cannot_connect_to_each_other_are_named(parted):
    """A second inspection finds them again, because only hosts that can connect are cached."""
    for _ in range(2):
        lines = inspect(parted, ["h0", "h1", "h2"])["lines"]
        assert [line.partition(" by TCP: ")[0] for line in lines] == [
            "host h1: cannot be reached from h2 at 10.77.0.11",
            "host h2: cannot be reached from h1 at 10.77.0.12",
        ]
        assert all("; let all TCP ports pass between the hosts (firewalls), " in line for line in lines)
    assert inspect(parted, ["h0", "h1", "h3"])["lines"] == []


def test_an_interpreter_missing_on_a_host_is_named(fresh):
    """Each host has its own /tmp."""
    fresh.on("h0", "ln", "-sf", sys.executable, "/tmp/python")
    lines = inspect(fresh, ["h0", "h1", "h2"], question={"python": "/tmp/python", "packages": []})["lines"]
    assert [line.partition(":")[0] for line in lines] == ["host h1", "host h2"]
    assert all("cannot start the interpreter /tmp/python: " in line for line in lines)


def test_docker_bridges_with_equal_addresses_do_not_mislead(fresh):
    for host in ("h0", "h1"):
        fresh.on(
            host,
            "sh",
            "-c",
            "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up",
        )
    try:
        found = inspect(fresh, ["h0", "h1"])
    finally:
        for host in ("h0", "h1"):
            fresh.on(host, "ip", "link", "del", "docker0")
    assert found["network"]["cidr"] == "10.77.0.0/24"


def test_hosts_with_only_ipv6_are_found(tmp_path):
    with open_bed(tmp_path, 2, FAMILY="6") as bed:
        found = inspect(bed, bed.names)
    assert found["lines"] == []
    assert found["network"] == {"cidr": "fd77::/64", "address": "fd77::10", "interface": "eth0"}


def test_without_checks_the_network_follows_from_names_and_ssh_aliases(fresh):
    config = fresh.shared / "aliases"
    config.write_text("Host far\n  HostName 10.77.0.12\n")
    program = (
        "import os, sys\nfrom poprun.hosts.inspection import *\nprint(guess_network(sys.argv[1:], None, os.environ))"
    )
    done = fresh.python("h0", program, "h0", "h1", "far", POPRUN_SSH_ARGS=f"-F {config}")
    assert done.stdout == "HostNetwork(cidr='10.77.0.0/24', address='10.77.0.10', interface='eth0')\n", done.stderr
    done = fresh.python("h0", program, "h1", "nowhere", POPRUN_SSH_ARGS=f"-F {config}")
    assert "PopRunError: host nowhere has no address; check its spelling" in done.stderr


def test_the_inspection_leaves_no_process_on_the_hosts(fresh):
    inspect(fresh, [*fresh.names, "hh"])
    assert {host: fresh.processes(host) for host in fresh.names} == dict.fromkeys(fresh.names, {})
