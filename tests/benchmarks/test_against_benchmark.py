"""The benchmark against another commit trains, or reduces, with both versions; how fast they are is not tested."""

import itertools

import pytest
from benchmark_runs import ROOT, run_benchmark

pytestmark = [pytest.mark.job, pytest.mark.complete, pytest.mark.cores(2)]
TURNS = ("--rounds", "2", "--turn-s", "0.01")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository, of which it takes another commit")
def test_there_is_a_row_for_each_model_and_number_of_replicas(tmp_path):
    words = ("--models", "cnn", "--replicas", "1", "2", "--batch-size", "2", *TURNS)
    figures, table = run_benchmark("against.py", tmp_path, "HEAD", *words)
    cases = [("cnn", 1), ("cnn", 2)]
    assert [(row["model"], row["replicas"]) for row in figures["rows"]] == cases
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [[model, str(count)] for model, count in cases]
    for row in figures["rows"]:
        assert all(len(times) == figures["rounds"] == 2 for times in row["rounds_ms"].values())
        assert set(row["ms"]) == set(row["compile_s"]) == {"before", "now"}
    assert [row["compile_over_one_replica"] is None for row in figures["rows"]] == [True, False]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository, of which it takes another commit")
def test_there_is_a_row_for_each_way_size_and_number_of_replicas(tmp_path):
    words = ("--over", "window", "ring", "--sizes", "1K", "64K", "--replicas", "1", "2", *TURNS)
    figures, table = run_benchmark("against_all_reduce.py", tmp_path, "HEAD", *words)
    cases = list(itertools.product(("window", "ring"), (1024, 65536), (1, 2)))
    assert figures["before"] == "HEAD"
    assert [(row["over"], row["nbytes"], row["replicas"]) for row in figures["rows"]] == cases
    assert [line.split()[0] for line in table.splitlines()[2:10]] == [over for over, _, _ in cases]
    for row in figures["rows"]:
        assert row["is_right"] == {"before": True, "now": True}
        assert all(len(times) == figures["rounds"] == 2 for times in row["rounds_us"].values())


def test_workers_over_grpc_are_compared_with_those_of_another_checkout(tmp_path):
    pytest.importorskip("grpc")
    (tmp_path / "other").symlink_to(ROOT, target_is_directory=True)
    words = ("--over", "grpc", "--instances", "3", "--sizes", "1M", "--replicas", "2", *TURNS)
    figures, table = run_benchmark("against_all_reduce.py", tmp_path, "--against", str(tmp_path / "other"), *words)
    assert figures["before"] == str(tmp_path / "other")
    [row] = figures["rows"]
    assert (row["over"], row["nbytes"], row["replicas"]) == ("grpc", 1 << 20, 2)
    assert row["is_right"] == {"before": True, "now": True}
    assert table.splitlines()[2].split()[:4] == ["grpc", "1", "MiB", "2"]
