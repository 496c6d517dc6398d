"""The all-reduce benchmark compares sums over Horovod that are right; how fast they are is not tested."""

import sys
from pathlib import Path

import pytest
from benchmark_runs import LONGER_LIMIT_S, run_benchmark

sys.path.append(str(Path(__file__).parents[1]))

from horovod_installed import needs_horovod  # noqa: E402

SIZES = {"4": 4, "100000": 100_000}  # the second is no power of two
WAYS = ["window", "mpi", "horovod", "hvd", "hvd_tuned"]
TURNS = ("--rounds", "2", "--block-s", "0.001")
pytestmark = [
    pytest.mark.job,
    pytest.mark.complete,
    pytest.mark.cores(2),
    pytest.mark.timeout(LONGER_LIMIT_S + 20),
    needs_horovod,
]


@pytest.fixture(scope="module", params=[2])
def run(request, tmp_path_factory):
    """Instances, the figures and the table of a run with one and with two replicas each."""
    folder = tmp_path_factory.mktemp("all_reduce_horovod")
    instances = request.param
    words = ("--backends", "horovod", "--instances", str(instances), "--replicas", "1", "2", "--sizes", *SIZES)
    return instances, *run_benchmark("all_reduce.py", folder, *words, *TURNS, limit_s=LONGER_LIMIT_S)


def test_there_is_a_row_for_every_size_and_number_of_replicas(run):
    instances, figures, table = run
    rows = figures["horovod"]["rows"]
    expected = [(nbytes, replicas, instances) for nbytes in SIZES.values() for replicas in (1, 2)]
    assert [(row["bytes"], row["local_replicas"], row["instances"]) for row in rows] == expected
    assert [f"{instances} x 1" in line for line in table.splitlines()[2:]] == [True, False] * len(SIZES)
    assert figures["rows"] == []


def test_all_sums_are_right(run):
    _, figures, _ = run
    for row in figures["horovod"]["rows"]:
        assert list(row["ways"]) == WAYS
        assert all(way["is_close"] for way in row["ways"].values())
        assert row["ways"]["window"]["has_same_bits"]


def test_each_way_has_a_turn_in_every_round(run):
    _, figures, _ = run
    turns = [way["rounds_ms"] for row in figures["horovod"]["rows"] for way in row["ways"].values()]
    assert all(len(times) == figures["rounds"] == 2 and min(times) > 0 for times in turns)


def test_ratios_follow_from_the_medians(run):
    _, figures, _ = run
    for row in figures["horovod"]["rows"]:
        of_mpi = row["ways"]["mpi"]["ms"]
        assert all(way["times_faster_than_mpi"] == pytest.approx(of_mpi / way["ms"]) for way in row["ways"].values())
