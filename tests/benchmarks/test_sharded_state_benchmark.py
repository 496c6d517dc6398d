"""The benchmark of sharded optimizer state counts its bytes, and measures memory that is there."""

import pytest
from benchmark_runs import run_benchmark

WIDTH = 512
VARIABLES = 4 * (4 * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10)  # bytes

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The figures and the table of a run."""
    words = ("--instances", "2", "--width", str(WIDTH), "--batch-size", "2", "--rounds", "1", "--steps", "1")
    return run_benchmark("sharded_state.py", tmp_path_factory.mktemp("sharded"), *words)


def test_an_instance_of_two_has_half_of_the_state_and_the_same_bits(run):
    figures, table = run
    (row,) = figures["rows"]
    whole, sharded = (row[way]["state_bytes"] for way in ("whole", "sharded"))
    assert whole == 2 * VARIABLES + 4  # of Adam, and its count
    assert whole / 2 < sharded < whole / 2 + 200  # small variables stay whole
    assert row["same_bits"]
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["whole", "sharded", "ratio"]


def test_the_peak_holds_variables_gradients_and_state(run):
    figures, _ = run
    (row,) = figures["rows"]
    for way in ("whole", "sharded"):
        assert row[way]["training_bytes"] > 2 * VARIABLES + row[way]["state_bytes"]
        assert row[way]["peak_bytes"] > row[way]["training_bytes"]
    for name, ratio in row["sharded_over_whole"].items():
        assert ratio == pytest.approx(row["sharded"][name] / row["whole"][name])
