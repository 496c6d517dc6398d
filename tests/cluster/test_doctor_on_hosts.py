"""`poprun doctor` on several hosts."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.complete]

DOCTOR = "import sys; from poprun.doctor import main; sys.exit(main(sys.argv[1:]))"


def examine(bed, *words):
    done = bed.python("h0", DOCTOR, *words, "--json")
    return done.returncode, json.loads(done.stdout)


def rows(report, check):
    return {each["host"]: each["fact"] for each in report["findings"] if each["check"] == check}


def test_hosts_in_good_order_have_no_faults(hosts):
    status, report = examine(hosts, "--host", ",".join(hosts.names))
    assert (status, report["ok"]) == (0, True), report
    assert report["network"]["cidr"] == "10.77.0.0/24"
    assert set(rows(report, "name service").values()) == {"knows all hosts"}
    assert rows(report, "connections") == {"all": "each of 4 hosts reaches every other one by TCP"}


def test_hosts_that_cannot_connect_to_each_other_are_a_fault(hosts):
    hosts.on("h1", "ip", "route", "add", "blackhole", "10.77.0.13/32")
    try:
        status, report = examine(hosts, "--host", ",".join(hosts.names))
    finally:
        hosts.on("h1", "ip", "route", "del", "blackhole", "10.77.0.13/32")
    assert status == 1
    found = {host: fact.partition(" by TCP: ")[0] for host, fact in rows(report, "connections").items()}
    assert found == {
        "h1": "cannot be reached from h3 at 10.77.0.11",
        "h3": "cannot be reached from h1 at 10.77.0.13",
    }


def test_host_names_that_a_host_does_not_know_are_reported(hosts):
    hosts.on("h1", "sh", "-c", "echo 127.0.0.1 localhost > /tmp/few; mount --bind /tmp/few /etc/hosts")
    try:
        status, report = examine(hosts, "--host", "h0,h1,h2")
    finally:
        hosts.on("h1", "umount", "/etc/hosts")
    assert status == 0
    assert rows(report, "name service")["h1"].startswith("has no address, or a different one, for h0, ")
    assert rows(report, "name service")["h2"] == "knows all hosts"


def test_an_unreachable_host_is_a_fault_and_the_others_are_examined(hosts):
    hosts.link("h2", "down")
    status, report = examine(hosts, "--host", "h0,h1,h2")
    assert (status, report["ok"]) == (1, False)
    faults = [each for each in report["findings"] if each["is_fault"]]
    assert [(each["check"], each["host"]) for each in faults] == [("ssh", "h2")]
    assert rows(report, "name service") == dict.fromkeys(["h0", "h1"], "knows all hosts")


def test_the_doctor_leaves_no_process_on_the_hosts(hosts):
    examine(hosts, "--host", ",".join(hosts.names))
    assert {host: hosts.processes(host) for host in hosts.names} == dict.fromkeys(hosts.names, {})
