"""The benchmark of several hosts compares right sums and counts what links carry; how fast it all is is not tested."""

import sys

import pytest
from benchmark_runs import BENCHMARKS, LONGER_LIMIT_S, run_benchmark

sys.path.append(str(BENCHMARKS))

from hosts import WAYS, hosts  # noqa: E402

pytestmark = [pytest.mark.cluster, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(LONGER_LIMIT_S + 30)]

SHORT, LONG = 1 << 12, 1 << 20
JOB = ("--hosts", "2", "--instances", "2", "--rate", "1gbit", "--delay", "0.5ms", "--sizes", str(SHORT), str(LONG))
LAUNCHES = {"mpirun", "poprun", "poprun, asks", "poprun, wrong host"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The figures and the table of a run."""
    try:
        with hosts(2):
            pass
    except SystemExit as reason:
        pytest.skip(str(reason))
    words = (*JOB, "--rounds", "1", "--block-s", "0.05")
    return run_benchmark("hosts.py", tmp_path_factory.mktemp("hosts"), *words, limit_s=LONGER_LIMIT_S)


def test_ours_has_the_bits_of_the_sequential_sum_and_all_ways_are_right(run):
    figures, _ = run
    assert [row["bytes"] for row in figures["rows"]] == [SHORT, LONG]
    for row in figures["rows"]:
        assert row["ways"].keys() == WAYS.keys() - {"chain"}  # that one is of another commit, which has to be named
        assert row["ways"]["ordered"]["has_same_bits"]
        assert all(way["is_close"] for way in row["ways"].values())


def test_no_link_carries_a_long_array_more_than_twice(run):
    figures, _ = run
    ours = figures["rows"][-1]["ways"]["ordered"]
    assert 1 <= ours["sent"] <= 2.1
    assert 1 <= ours["received"] <= 2.1


def test_the_bound_is_the_time_of_what_each_of_two_hosts_has_to_send_at_the_rate_of_the_link(run):
    figures, table = run
    for row in figures["rows"]:
        assert row["bound_ms"] == pytest.approx(1e3 * 2 * (2 - 1) / 2 * row["bytes"] / 125e6)
        for way in row["ways"].values():
            assert way["over_bound"] == pytest.approx(way["ms"] / row["bound_ms"])
            assert len(way["rounds_ms"]) == figures["rounds"] == 1
    assert "1 MiB" in table


def test_launches_are_compared_with_mpirun_and_a_wrong_host_is_refused(run):
    figures, table = run
    launch = figures["launch"]
    assert launch["instances"] == 4
    assert launch["ms"].keys() == launch["rounds_ms"].keys() == LAUNCHES
    assert launch["added_ms"]["poprun"] == pytest.approx(launch["ms"]["poprun"] - launch["ms"]["mpirun"])
    assert "poprun, wrong host" in table
