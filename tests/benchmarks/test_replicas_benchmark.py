"""The benchmark of threads against simulated devices compares the same gradients; how fast they are is not tested."""

import sys

import pytest
from benchmark_runs import BENCHMARKS, run_benchmark

sys.path.append(str(BENCHMARKS))

import replicas  # noqa: E402

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2)]


def test_there_is_a_row_for_each_model_and_number_of_replicas(tmp_path):
    words = ("--models", "transformer", "--replicas", "1", "2", "--batch-size", "2", "--rounds", "2")
    figures, table = run_benchmark("replicas.py", tmp_path, *words)
    cases = [("transformer", 1), ("transformer", 2)]
    assert [(row["model"], row["replicas"]) for row in figures["rows"]] == cases
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [[model, str(count)] for model, count in cases]
    for row in figures["rows"]:
        assert all(len(times) == figures["rounds"] == 2 for times in row["rounds_ms"].values())
        assert set(row["ms"]) == {"shard_map", "threads"}
    assert [row["first_over_one_replica"] is None for row in figures["rows"]] == [True, False]


def test_a_model_is_compared_with_one_replica_of_its_own():
    rows = [{"model": model, "replicas": count} for model in ("mlp", "transformer") for count in (1, 2)]
    assert replicas.row_of_one(rows, "transformer") is rows[2]
    assert replicas.row_of_one(rows, "cnn") is None
