"""The benchmark of the training step compares Horovod on the same work; how fast it is is not tested."""

import re
import sys
from pathlib import Path

import pytest
from benchmark_runs import LONGER_LIMIT_S, run_benchmark

sys.path.append(str(Path(__file__).parents[1]))

from horovod_installed import needs_horovod  # noqa: E402

TURNS = ("--batch-size", "1", "--steps", "1", "--rounds", "1")
pytestmark = [
    pytest.mark.job,
    pytest.mark.long,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(LONGER_LIMIT_S + 20),
    needs_horovod,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The row and the table of a run with one model, in which Horovod takes part."""
    folder = tmp_path_factory.mktemp("train_step_horovod")
    words = ("--against", "horovod", "--models", "mlp")
    figures, table = run_benchmark("train_step.py", folder, *TURNS, *words, limit_s=LONGER_LIMIT_S)
    (row,) = figures["rows"]
    return row, table


def test_horovod_has_a_column_as_it_comes_and_tuned_and_below_our_strategy(run):
    row, table = run
    assert list(row["ms_per_step"]) == ["ours", "dataset", "alone", "over_hvd", "hvd", "hvd_tuned"]
    titles = re.split(r"\s{2,}", table.splitlines()[1])
    cells = table.splitlines()[2].split()
    assert titles[1:7] == ["ours", "dataset", "alone", "over hvd", "hvd", "tuned"]
    assert titles[-4:] == ["hvd/ours", "tuned/ours", "over hvd/hvd", "over hvd/tuned"]
    assert len(cells) == len(titles)
    assert "-" not in cells


def test_ways_over_horovod_do_the_same_work(run):
    row, _ = run
    over_horovod = {f"{way} has the same losses" for way in ("over_hvd", "hvd", "hvd_tuned")}
    assert over_horovod <= row["checks"].keys()
    assert all(row["checks"].values())


def test_ratios_to_horovod_follow_from_the_medians(run):
    row, _ = run
    ms = row["ms_per_step"]
    assert row["hvd_over_ours"] == pytest.approx(ms["hvd"] / ms["ours"])
    assert row["hvd_tuned_over_ours"] == pytest.approx(ms["hvd_tuned"] / ms["ours"])
    assert row["over_hvd_over_hvd"] == pytest.approx(ms["over_hvd"] / ms["hvd"])
    assert row["over_hvd_over_hvd_tuned"] == pytest.approx(ms["over_hvd"] / ms["hvd_tuned"])
