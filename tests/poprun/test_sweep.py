"""Which processes on other hosts are swept: the daemons of one job, whatever the host's name looks like."""

from __future__ import annotations

import re

import pytest

from poprun.hosts.sweep import pattern_of


def daemon(nspace: str) -> str:
    """The command line of a daemon of PRRTE 3.0.14."""
    return (
        f'/opt/bin/prted --daemonize --prtemca ess_base_nspace "{nspace}" --prtemca ess_base_vpid 1 '
        f'--prtemca prte_hnp_uri "{nspace}.0;tcp://10.77.0.10:40001:24"'
    )


@pytest.mark.parametrize(
    ("host", "nspace"),
    [
        ("n1", "prterun-n1-4711@0"),
        ("n1.cluster.example", "prterun-n1-4711@0"),
        ("n1.cluster.example", "prterun-n1.cluster.example-4711@0"),
        ("gpu-rack-3.east", "prterun-gpu-rack-3-4711@0"),
    ],
)
def test_the_daemons_of_a_job_are_found_by_the_short_and_by_the_full_name(host: str, nspace: str) -> None:
    assert re.search(pattern_of(f"{host}-4711"), daemon(nspace))


@pytest.mark.parametrize(
    "nspace", ["prterun-n1-47110@0", "prterun-n1-711@0", "prterun-n12-4711@0", "prterun-n1xcluster-4711@0"]
)
def test_those_of_other_jobs_are_not(nspace: str) -> None:
    assert not re.search(pattern_of("n1.cluster-4711"), daemon(nspace))


def test_the_shell_that_looks_for_them_is_none() -> None:
    for host in ("n1", "n1.cluster.example"):
        pattern = pattern_of(f"{host}-4711")
        assert not re.search(pattern, f"pkill -KILL -f {pattern}")
