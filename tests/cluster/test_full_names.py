"""Hosts whose names differ only behind the first dot, which Open MPI ignores by default."""

from __future__ import annotations

import pytest
from beds import open_bed
from looping import own_lines, words

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(170)]

BOTH = ("n1.east", "n1.west")


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    """Provide three hosts: h0 is n1.east, h1 is n1.west, h2 is n2.east."""
    with open_bed(tmp_path_factory.mktemp("names"), 3, CALLED=f"{' '.join(BOTH)} n2.east") as hosts:
        yield hosts


def run(bed, where, hosts, *options):
    """Run a job whose instances print their host names; the tags show the names known to poprun."""
    return bed.on(where, *words(hosts, len(hosts), "--tag-host", *options), "hostname", limit_s=120.0)


def lines(*hosts):
    return [f"[1,{index}][{host}]<stdout>:{host}" for index, host in enumerate(hosts)]


@pytest.mark.complete
def test_each_instance_runs_on_the_named_host(bed):
    done = run(bed, "h0", BOTH)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, lines(*BOTH)), done.stderr


UNCHECKED = "--skip-checks"


@pytest.mark.complete
@pytest.mark.parametrize(
    ("where", "hosts", "options"),
    [
        ("h0", ("n1.west", "n1.east"), []),
        ("h0", ("n1.west",), [UNCHECKED]),
        ("h1", ("n1.east",), []),
        ("h1", ("n1.west", "n2.east"), [UNCHECKED]),
        ("h2", (*BOTH, "n2.east"), []),
        ("h2", BOTH, [UNCHECKED]),
    ],
)
def test_jobs_run_on_the_named_hosts_from_any_host(bed, where, hosts, options):
    done = run(bed, where, hosts, *options)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, lines(*hosts)), done.stderr


@pytest.mark.complete
def test_a_full_name_is_not_taken_for_the_short_name_of_the_local_machine(bed):
    bed.on("h0", "hostname", "n1")
    try:
        done = run(bed, "h0", ["n1.west"])
    finally:
        bed.on("h0", "hostname", "n1.east")
    assert (done.returncode, done.stdout.splitlines()) == (0, lines("n1.west")), done.stderr


def test_an_instance_that_open_mpi_starts_on_a_wrong_host_does_not_run(bed):
    """The user makes Open MPI ignore domains, so it confuses the two hosts."""
    done = run(bed, "h0", BOTH, "--mpi-global-args=--prtemca prte_keep_fqdn_hostnames 0")
    assert done.returncode == 1
    assert (
        "instance 1 is meant for host n1.west, but Open MPI has started it on n1.east, so it does not run"
        in done.stderr
    )
    assert own_lines(done.stderr)[0].startswith("instance 1 on host n1.east (pid ")
