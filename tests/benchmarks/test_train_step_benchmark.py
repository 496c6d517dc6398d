"""The benchmark of the training step compares ways that do the same work; how fast they are is not tested."""

import pytest
from benchmark_runs import LONGER_LIMIT_S, run_benchmark

TURNS = ("--batch-size", "3", "--steps", "2", "--rounds", "2")
pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(LONGER_LIMIT_S + 20)]

WAYS = {
    "ring": (["cnn"], "--strategy-mechanism", "ring"),
    "multi-worker": (["mlp"], "--strategy", "multi-worker"),
}


@pytest.fixture(scope="module", params=WAYS)
def run(request, tmp_path_factory):
    """The models, the figures and the table of a run in one way."""
    folder = tmp_path_factory.mktemp("train_step")
    models, *way = WAYS[request.param]
    words = (*TURNS, "--models", *models, *way)
    return models, *run_benchmark("train_step.py", folder, *words, limit_s=LONGER_LIMIT_S)


def test_there_is_a_row_for_every_model(run):
    models, figures, table = run
    assert [row["model"] for row in figures["rows"]] == models
    assert [line.split()[0] for line in table.splitlines()[2:]] == models


def test_all_ways_do_the_same_work(run):
    _, figures, _ = run
    for row in figures["rows"]:
        assert {"instances have the same variables", "alone begins with the same loss"} <= row["checks"].keys()
        assert all(row["checks"].values())


def test_ratios_follow_from_the_medians(run):
    _, figures, _ = run
    for row in figures["rows"]:
        ms = row["ms_per_step"]
        assert row["ours_over_alone"] == pytest.approx(ms["ours"] / ms["alone"])
        assert row["dataset_over_alone"] == pytest.approx(ms["dataset"] / ms["alone"])
        assert all(len(times) == figures["rounds"] and min(times) > 0 for times in row["rounds_ms"].values())
