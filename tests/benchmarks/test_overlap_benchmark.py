"""The benchmark of streaming compares ways that do the same work; how fast they are is not tested."""

import sys

import pytest
from benchmark_runs import BENCHMARKS, run_benchmark

sys.path.append(str(BENCHMARKS))

from slow_link import SlowLinkError, slow_link  # noqa: E402

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2)]

WORDS = ("--batch-sizes", "3", "--rate", "1gbit", "--delay-ms", "0.5", "--rounds", "2", "--steps", "1")
GRADIENT_BYTES = 4 * (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)


@pytest.fixture(scope="module")
def needs_slow_link():
    pytest.importorskip("grpc")
    try:
        with slow_link():
            pass
    except SlowLinkError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def run(tmp_path_factory, needs_slow_link):
    """The figures and the table of a run."""
    return run_benchmark("overlap.py", tmp_path_factory.mktemp("overlap"), *WORDS)


def test_there_is_a_row_for_the_batch_size(run):
    figures, table = run
    assert [row["batch_size"] for row in figures["rows"]] == [3]
    assert table.splitlines()[2].split()[0] == "3"


def test_both_ways_and_both_workers_have_the_same_variables(run):
    figures, table = run
    assert all(row["has_same_bits"] for row in figures["rows"])
    assert "the same on both workers" in table.splitlines()[-1]


def test_communication_is_the_bytes_of_the_gradients_over_the_rate(run):
    figures, _ = run
    for row in figures["rows"]:
        assert row["ms_per_step"]["communication"] == pytest.approx(1e3 * GRADIENT_BYTES / 125e6)


def test_ratios_follow_from_the_medians(run):
    figures, _ = run
    for row in figures["rows"]:
        ms = row["ms_per_step"]
        assert row["ideal_ms"] == max(ms["compute"], ms["communication"])
        assert row["streaming_over_ideal"] == pytest.approx(ms["streaming"] / row["ideal_ms"])
        assert row["saved_by_streaming"] == pytest.approx(1 - ms["streaming"] / ms["plain"])
        assert all(len(times) == figures["rounds"] == 2 for times in row["rounds_ms"].values())


def test_int8_gradients_take_a_quarter_of_the_bytes_on_the_interface(tmp_path, needs_slow_link):
    figures, table = run_benchmark("overlap.py", tmp_path, "--gradient-transfer-dtype", "int8", *WORDS)
    (row,) = figures["rows"]
    assert row["has_same_bits"]
    assert GRADIENT_BYTES < max(row["sent_bytes_per_step"]["float32"]) < 1.05 * GRADIENT_BYTES
    assert 0.25 < row["bytes_over_float32"] < 0.28
    assert "MB of int8" in table.splitlines()[1]
