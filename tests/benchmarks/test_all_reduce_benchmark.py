"""The all-reduce benchmark compares sums that are right; how fast they are is not tested."""

import pytest
from benchmark_runs import run_benchmark

SIZES = {"1K": 1024, "100000": 100_000}  # the second is no power of two
OURS = ("window", "window_private", "ring")
TURNS = ("--rounds", "2", "--block-s", "0.001", "--stream-size", "64K")


@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=[pytest.mark.complete, pytest.mark.cores(2)])])
def run(request, tmp_path_factory):
    """Instances, the figures and the table of a run with one and with two replicas each."""
    folder = tmp_path_factory.mktemp("all_reduce")
    instances = request.param
    words = ("--instances", str(instances), "--replicas", "1", "2", "--sizes", *SIZES)
    return instances, *run_benchmark("all_reduce.py", folder, *words, *TURNS)


@pytest.mark.complete
@pytest.mark.job
def test_there_is_a_row_for_every_size_and_number_of_replicas(run):
    instances, figures, _ = run
    rows = [(row["bytes"], row["local_replicas"], row["instances"]) for row in figures["rows"]]
    assert rows == [(nbytes, replicas, instances) for nbytes in SIZES.values() for replicas in (1, 2)]


@pytest.mark.complete
@pytest.mark.job
def test_our_sums_have_the_bits_of_the_sequential_sum(run):
    _, figures, _ = run
    assert all(row["ways"][name]["has_same_bits"] for row in figures["rows"] for name in OURS)


@pytest.mark.job
def test_the_sums_of_the_peers_are_right(run):
    _, figures, _ = run
    assert all(way["is_close"] for row in figures["rows"] for way in row["ways"].values())
    assert all("mpi" in row["ways"] for row in figures["rows"])


@pytest.mark.job
def test_each_way_has_a_turn_in_every_round(run):
    _, figures, _ = run
    turns = [way["rounds_ms"] for row in figures["rows"] for way in row["ways"].values()]
    assert all(len(times) == figures["rounds"] == 2 and min(times) > 0 for times in turns)


@pytest.mark.job
def test_the_bound_counts_every_replica_and_the_result(run):
    instances, figures, _ = run
    for row in figures["rows"]:
        bytes_moved = (instances * row["local_replicas"] + 1) * row["bytes"]
        assert row["bound_ms"] == pytest.approx(1e-6 * bytes_moved / row["bandwidth_gb_per_s"])


@pytest.mark.job
def test_the_table_has_a_line_for_every_row(run):
    instances, figures, table = run
    assert [f"{instances} x 1" in line for line in table.splitlines()[2:]] == [True, False] * len(SIZES)
    assert len(table.splitlines()) == 2 + len(figures["rows"])
