"""The benchmark of the training step compares ways that do the same work; how fast they are is not tested."""

import os
from importlib.util import find_spec

import pytest
from benchmark_runs import LONGER_LIMIT_S, run_benchmark

TURNS = ("--batch-size", "1", "--steps", "1", "--rounds", "1")
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
    environ = without_torch(folder) if request.param == "multi-worker" else {}
    return models, *run_benchmark("train_step.py", folder, *words, limit_s=LONGER_LIMIT_S, **environ)


def without_torch(folder):
    """What lets processes find no PyTorch that can be imported."""
    (folder / "torch.py").write_text("raise ImportError\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_there_is_a_row_for_every_model(run):
    models, figures, table = run
    assert [row["model"] for row in figures["rows"]] == models
    assert [line.split()[0] for line in table.splitlines()[2:]] == models


def test_torch_has_a_column_where_it_can_be_imported(run):
    _, figures, _ = run
    expected = figures["strategy"] == "popdist" and find_spec("torch") is not None
    assert all(("ddp" in row["ms_per_step"]) == expected for row in figures["rows"])


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
