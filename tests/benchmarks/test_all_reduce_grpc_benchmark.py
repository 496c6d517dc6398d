"""The benchmark of our ring over gRPC compares sums that are right; how fast they are is not tested."""

import pytest
from benchmark_runs import run_benchmark

SIZES = {"4": 4, "100000": 100_000, "3M": 3 << 20}  # 3 MiB are several messages
TURNS = ("--rounds", "2", "--block-s", "0.001")
pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The figures and the table of a run."""
    pytest.importorskip("grpc")
    folder = tmp_path_factory.mktemp("all_reduce_grpc")
    return run_benchmark("all_reduce.py", folder, "--backends", "grpc", "--sizes", *SIZES, *TURNS)


def test_there_is_a_row_for_every_size(run):
    figures, table = run
    assert [row["bytes"] for row in figures["grpc"]["rows"]] == list(SIZES.values())
    assert figures["rows"] == []
    assert len(table.splitlines()) == 3 + len(SIZES)


def test_sums_have_the_bits_of_the_sequential_sum(run):
    figures, _ = run
    assert all(row["has_same_bits"] for row in figures["grpc"]["rows"])


def test_ratios_and_bandwidths_follow_from_the_medians(run):
    figures, _ = run
    for row in figures["grpc"]["rows"]:
        ms = row["ms"]
        assert row["grpc_over_bare"] == pytest.approx(ms["grpc"] / ms["bare"])
        assert row["gb_per_s"]["grpc"] == pytest.approx(1e-6 * row["bytes"] / ms["grpc"])
        assert all(len(times) == figures["rounds"] == 2 and min(times) > 0 for times in row["rounds_ms"].values())


def test_the_extra_memory_is_that_of_the_largest_size(run):
    figures, table = run
    assert figures["grpc"]["memory"]["bytes"] == max(SIZES.values())
    assert "an all-reduce of 3 MiB takes" in table.splitlines()[-1]
