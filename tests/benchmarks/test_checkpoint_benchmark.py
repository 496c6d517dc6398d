"""The benchmark of checkpoints saves as often as it says; what that costs is not tested."""

import pytest
from benchmark_runs import run_benchmark

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2)]

WORDS = (
    "--instances",
    "1",
    "2",
    "--model",
    "cnn",
    "--batch-size",
    "3",
    "--every",
    "2",
    "--rounds",
    "2",
    "--steps",
    "3",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The figures and the table of a run."""
    pytest.importorskip("orbax.checkpoint")
    return run_benchmark("checkpoint.py", tmp_path_factory.mktemp("checkpoint"), *WORDS)


def test_there_is_a_row_for_each_number_of_instances(run):
    figures, table = run
    assert [row["instances"] for row in figures["rows"]] == [1, 2]
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["1", "2"]


def test_ratios_follow_from_the_medians(run):
    figures, _ = run
    for row in figures["rows"]:
        ms = row["ms_per_step"]
        assert row["saving_over_plain"] == pytest.approx(ms["saving"] / ms["plain"])
        assert row["blocked_over_plain"] == pytest.approx(ms["blocked"] / ms["plain"])
        assert 0 < ms["blocked"] < ms["saving"]
        assert all(len(times) == figures["rounds"] == 2 for times in row["rounds_ms"].values())
