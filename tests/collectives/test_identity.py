"""Users of a machine and certificates: other users, and the hosts for which a caller may speak."""

from __future__ import annotations

import os
import pwd

import pytest

from collectives.network.identity import Bearer, people, this_runner

# ---- users


def account(name: str, number: int, shell: str = "/bin/bash") -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", number, number, "", f"/home/{name}", shell))


ACCOUNTS = [
    account("root", 0),
    account("daemon", 1, "/usr/sbin/nologin"),
    account("sync", 4, "/bin/sync"),
    account("alice", 1000),
    account("bob", 1001, "/usr/bin/fish"),
    account("slurm", 64030, "/bin/false"),
    account("nobody", 65534, "/usr/sbin/nologin"),
]


def test_other_people_are_accounts_with_a_login() -> None:
    assert people(ACCOUNTS, [], own=1000) == ["bob"]
    assert people(ACCOUNTS, [], own=0) == ["alice", "bob"]


def test_a_user_is_alone_with_root_and_services() -> None:
    assert people([each for each in ACCOUNTS if each.pw_name != "bob"], [0, 1, 4, 1000, 64030, 65534], own=1000) == []


def test_the_owner_of_a_process_needs_no_account() -> None:
    assert people(ACCOUNTS[:4], [0, 1000, 271_828], own=1000) == ["user 271828"]


def test_the_runner_of_the_current_process_is_described() -> None:
    runner = this_runner()
    assert (runner.user_id, runner.process) == (os.getuid(), os.getpid())
    assert runner.title == f"{runner.program} of {runner.user}, process {runner.process} on {runner.host}"


# ---- certificates


def bearer(*alternatives: bytes, common: bytes = b"") -> Bearer:
    """Return a bearer from the certificate properties that grpcio 1.85 reports."""
    numbers = [each for each in alternatives if each.replace(b".", b"").isdigit() or b":" in each]
    names = [each for each in alternatives if each not in numbers]
    return Bearer.of(
        {
            "x509_common_name": [common],
            "x509_subject_alternative_name": list(alternatives),
            "peer_dns": names,
            "peer_ip": numbers,
        }
    )


@pytest.mark.parametrize(
    ("host", "alternative"),
    [
        ("node-a", b"node-a"),
        ("Node-A.example", b"node-a.EXAMPLE"),
        ("node-a.example.", b"node-a.example"),
        ("node-a.cluster.example", b"*.cluster.example"),
        ("192.0.2.7", b"192.0.2.7"),
        ("2001:db8::7", b"2001:db8:0:0:0:0:0:7"),
        ("fe80::7%eth0", b"fe80::7"),
    ],
)
def test_a_certificate_is_valid_for_its_hosts(host: str, alternative: bytes) -> None:
    assert bearer(b"other.example", alternative).is_for(host)


@pytest.mark.parametrize(
    ("host", "alternative"),
    [
        ("node-a", b"node-b"),
        ("node-a", b"node-a.example"),
        ("node-a.example", b"node-a"),
        ("a.b.cluster.example", b"*.cluster.example"),
        ("cluster.example", b"*.cluster.example"),
        (".cluster.example", b"*.cluster.example"),
        ("cluster.example", b"*.example"),
        ("node-a.example", b"node-*.example"),
        ("node-a", b"*"),
        ("192.0.2.7", b"192.0.2.70"),
        ("192.0.2.7", b"*.0.2.7"),
        ("", b""),
    ],
)
def test_a_certificate_is_invalid_for_other_hosts(host: str, alternative: bytes) -> None:
    assert not bearer(alternative).is_for(host)


def test_an_ip_address_in_a_certificate_s_names_does_not_count_as_address() -> None:
    context = {"x509_subject_alternative_name": [b"192.0.2.7"], "peer_dns": [b"192.0.2.7"]}
    assert not Bearer.of(context).is_for("192.0.2.7")


def test_the_common_name_counts_without_alternative_names() -> None:
    assert bearer(common=b"node-a").is_for("node-a")
    assert not bearer(b"node-b", common=b"node-a").is_for("node-a")


def test_a_caller_without_certificate_speaks_for_no_host() -> None:
    assert Bearer.of({}).hosts == "no host"
    assert not Bearer.of({}).is_for("node-a")
