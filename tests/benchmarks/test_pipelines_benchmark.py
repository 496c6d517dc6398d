"""The benchmark of pipelines compares equal updates, and measures the memory of schedules; no speed is tested."""

import pytest
from benchmark_runs import LONGER_LIMIT_S, run_benchmark

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2), pytest.mark.timeout(LONGER_LIMIT_S + 20)]


def test_all_ways_have_the_same_bits_and_keep_what_their_schedules_say(tmp_path):
    words = ("--layers", "1", "--width", "4", "--batch-size", "2", "--micro-batches", "8", "--rounds", "1")
    figures, text = run_benchmark("pipelines.py", tmp_path, *words, "--kept-mib", "2", limit_s=LONGER_LIMIT_S)
    assert [row["way"] for row in figures["rows"]][:2] == ["sequential", "grouped"]
    assert all(row["same_bits"] for row in figures["rows"])
    memory = {row["way"]: row for row in figures["memory"]}
    assert memory["grouped"]["kept"] == "7, 5, 3, 1"
    peaks = [memory[way]["peak_bytes"] for way in ("grouped, recomputing", "interleaved", "grouped")]
    assert peaks == sorted(peaks)
    assert text.count("at most") == 7
    assert "grouped" in text
