"""The benchmark of feeds takes all ways, and its ratios follow from its figures; what they are is not tested."""

from statistics import median

import pytest
from benchmark_runs import run_benchmark


@pytest.mark.job
@pytest.mark.complete
@pytest.mark.cores(2)
def test_all_ways_take_turns(tmp_path):
    words = ("--replicas", "2", "--batch-size", "2", "--rounds", "2", "--steps", "3")
    figures, table = run_benchmark("feeds.py", tmp_path, *words)
    [row] = figures["rows"]
    assert row["losses"] == 3 * 3  # the outfeed has those of both rounds, and of the first run
    for way in ("infeed", "both"):
        pairs = zip(row["rounds_ms"]["device"], row["rounds_ms"][way], strict=True)
        assert row[f"device_over_{way}"] == pytest.approx(median(a / b for a, b in pairs))
    assert table.splitlines()[2].split()[0] == "2"
