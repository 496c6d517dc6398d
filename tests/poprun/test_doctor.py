"""The facts that `poprun doctor` reads, measures and shows."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest
from recorded_hosts import NETWORK, VERSIONS, host

from popdist.instance import this_host
from popdist.xla import WITHOUT_SUMS
from poprun.doctor import (
    DoctorReport,
    DoctorRequest,
    check_load,
    check_mtu,
    check_names,
    check_sums,
    draw_table,
    main,
    read_words,
)
from poprun.errors import UsageError
from poprun.hosts.host_checks import Finding
from poprun.hosts.host_facts import Interface
from poprun.hosts.links import HelperError, LinkHelper, find_blocked, look_up_names

LOCAL = ("sh", "-c", 'eval "$3"', "ssh")
FACTS = {"h0": host(0), "h1": host(1)}
KNOWN = {"h0": ["10.77.0.10"], "h1": ["10.77.0.11"]}


@pytest.fixture(autouse=True)
def _busy_machines_have_time(monkeypatch):
    monkeypatch.setenv("POPRUN_CHECK_TIMEOUT_S", "60")


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], DoctorRequest()),
        (["--json"], DoctorRequest(as_json=True)),
        (["--host", "a,b", "--host=c"], DoctorRequest(("a", "b", "c"))),
        (["-H", "a", "--host-subnet", "eth0"], DoctorRequest(("a",), "eth0")),
        (["--host-subnet=10.0.0.0/8"], DoctorRequest((), "10.0.0.0/8")),
    ],
)
def test_the_command_line_is_parsed(words, asked):
    assert read_words(words) == asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hots", "a"], "unknown option --hots, did you mean --host"),
        (["--host"], "--host needs a list of hosts"),
        (["--host="], "--host is empty"),
        (["a"], "poprun doctor takes options only, not 'a'; usage: poprun doctor"),
    ],
)
def test_an_invalid_command_line_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        read_words(words)


def test_hosts_are_written_as_for_a_launch():
    assert read_words(["--host", "n[0-1]"]).hosts == ("n0", "n1")
    with pytest.raises(UsageError, match="host a is given twice"):
        read_words(["--host", "a", "--host", "a"])


def test_hosts_that_know_all_names_get_no_advice():
    assert [(each.host, each.fact, each.way_out) for each in check_names({"h0": KNOWN, "h1": KNOWN}, FACTS)] == [
        ("h0", "knows all hosts", ""),
        ("h1", "knows all hosts", ""),
    ]


@pytest.mark.parametrize("known", [{"h0": KNOWN["h0"]}, {**KNOWN, "h1": ["10.0.0.1"]}])
def test_a_name_without_its_address_gets_advice(known):
    (finding,) = check_names({"h1": known}, FACTS)
    assert (finding.fact, finding.is_fault) == ("has no address, or a different one, for h1", False)
    assert "/etc/hosts" in finding.way_out


def test_a_host_that_does_not_answer_is_a_fault():
    (finding,) = check_names({"h1": HelperError("gave no answer within 5 s")}, FACTS)
    assert finding.is_fault
    assert (finding.fact, finding.way_out) == ("gave no answer within 5 s", "try `ssh h1 true`")


def test_a_host_with_a_different_packet_size_is_named():
    jumbo = replace(host(1), interfaces=(Interface("eth0", "10.77.0.11", 24, 9000),))
    (finding,) = check_mtu({"h0": host(0), "h1": jumbo, "h2": host(2)}, NETWORK)
    assert (finding.host, finding.fact) == ("h1", "packets of 9000 bytes, 1500 on most hosts")
    assert list(check_mtu(FACTS, NETWORK)) == []


def test_a_busy_host_gets_advice():
    calm, busy = check_load({"h0": host(0), "h1": host(1, load=9.0)})
    assert (calm.fact, calm.way_out) == ("load 0.5", "")
    assert (busy.fact, busy.is_fault) == ("load 9.0", False)
    assert busy.way_out.startswith("others compute there")


def test_hosts_with_the_same_result_share_a_row():
    findings = [
        Finding("cores", "h0", "4 cores"),
        Finding("cores", "h1", "4 cores"),
        Finding("ssh", "h2", "is down", "start it", is_fault=True),
    ]
    assert draw_table(findings).splitlines() == [
        "       check  host   result   way out",
        "ok     cores  h0,h1  4 cores",
        "FAULT  ssh    h2     is down  start it",
        "",
        "1 fault",
    ]


@pytest.mark.parametrize("columns", [80, 60])
def test_a_narrow_table_puts_the_way_out_below_the_result(columns):
    fact, way_out = (
        "jaxlib 0.10.2 computes wrong sums on CPUs, and SUMS is 1",
        "take that out of the environment of all hosts",
    )
    findings = [Finding("sums", "h0,h1", fact, way_out), Finding("name service", "h0", "knows all hosts")]
    lines = draw_table(findings, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0] == "      check         host   result -> way out"
    assert " ".join(line[27:].strip() for line in lines[1:-3]).startswith(f"{fact} -> {way_out}")
    assert lines[-1] == "0 faults"
    assert max(map(len, draw_table(findings).splitlines())) > columns


def test_advice_is_not_a_fault():
    assert DoctorReport((Finding("load", "h0", "load 9", "others compute there"),)).is_well
    assert not DoctorReport((Finding("ssh", "h0", "is down", "start it", is_fault=True),)).is_well


def test_hosts_that_reach_each_other_are_not_blocked():
    assert find_blocked({"a": "127.0.0.1", "b": "127.0.0.2"}, sys.executable, LOCAL, 60.0) == []
    assert find_blocked({}, sys.executable, LOCAL, 60.0) == []


def test_helpers_look_names_up():
    known = look_up_names(["a", "b"], ["localhost", "no-such-host.invalid"], sys.executable, LOCAL, 60.0)
    assert list(known) == ["a", "b"]
    for found in known.values():
        assert "127.0.0.1" in found["localhost"]
        assert found["no-such-host.invalid"] == []


def test_a_helper_that_cannot_start_gives_the_reason():
    with LinkHelper("far", "/no/python", LOCAL) as helper, pytest.raises(HelperError, match="not found"):
        helper.ask("look_up", 60, names=[])


def test_doctor_examines_this_machine_without_a_list_of_hosts(capfd):
    assert main(["--json"]) in (0, 1)
    report = json.loads(capfd.readouterr().out)
    assert {each["host"] for each in report["findings"]} == {this_host()}
    assert {"versions", "cores", "/dev/shm", "kernel"} <= {each["check"] for each in report["findings"]}
    assert report["ok"] is not any(each["is_fault"] for each in report["findings"])
    assert report["network"] is None


def test_the_exit_status_is_1_for_a_host_that_cannot_be_reached(capfd, monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\necho 'ssh: Could not resolve hostname no-such: Name or service not known' >&2; exit 255\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["--host", "no-such"]) == 1
    said = capfd.readouterr().out
    assert "ssh: Could not resolve hostname no-such: Name or service not known" in said
    assert "check the spelling in --host" in said


def says(jaxlib: str, **environ: str) -> Finding:
    (finding,) = check_sums({"h0": host(0, versions=VERSIONS | {"jaxlib": jaxlib})}, environ)
    return finding


@pytest.mark.parametrize(
    ("jaxlib", "fact"),
    [
        ("0.11.0", "jaxlib 0.11.0 computes wrong sums without "),
        ("0.13.0", "jaxlib 0.13.0 is newer than the measured versions without "),
    ],
)
@pytest.mark.parametrize("environ", [{}, {"JAX_PLATFORMS": "cuda"}, {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}])
def test_wrong_sums_that_strategies_prevent_are_a_hint_for_other_programs(jaxlib, fact, environ):
    finding = says(jaxlib, **environ)
    assert finding.fact == f"{fact}{WITHOUT_SUMS}, which strategies and poprun set"
    assert finding.is_advice
    assert finding.way_out == "for other JAX programs, put it into XLA_FLAGS"


@pytest.mark.parametrize(
    ("jaxlib", "environ", "fact"),
    [
        ("0.10.1", {}, "jaxlib 0.10.1 computes right sums"),
        ("0.11.0", {"XLA_FLAGS": WITHOUT_SUMS}, "jaxlib 0.11.0 computes right sums with the flags in XLA_FLAGS"),
    ],
)
def test_only_right_sums_are_reported_as_ok(jaxlib, environ, fact):
    assert says(jaxlib, **environ) == Finding("sums", "h0", fact)


def test_flags_that_ask_for_wrong_sums_are_a_fault():
    finding = says("0.10.2", XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=+reduce")
    assert finding.is_fault
    assert "XLA_FLAGS asks for it" in finding.fact
    assert finding.way_out.startswith("take reduce out of it")


def test_a_user_who_allows_wrong_sums_gets_advice():
    finding = says("0.10.2", POPDIST_ALLOW_WRONG_SUMS="1")
    assert finding.fact == (
        "jaxlib 0.10.2 computes wrong sums on CPUs if it passes them to YNNPACK, and POPDIST_ALLOW_WRONG_SUMS is 1"
    )
    assert (finding.way_out, finding.is_fault) == ("remove POPDIST_ALLOW_WRONG_SUMS from the environment", False)


def test_hosts_without_jaxlib_get_no_finding_about_sums():
    assert list(check_sums({"h0": host(0, versions=VERSIONS | {"jaxlib": ""})}, {})) == []
