"""Data sets of grain and other random access: dealt out like arrays, transformed alike everywhere, resumable."""

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import grain
import numpy as np
import pytest

import popdist
from popdist.errors import LifeCycleError
from strategies import GrainSource, IPUStrategy, Masked, Position
from strategies.data.datasets import DistributedDataset

ROOT = Path(__file__).parents[2]
LENGTH = 77
LIMIT_S = 60.0


class Records:
    """A source of numbers that counts reads."""

    def __init__(self, length=LENGTH):
        self.length = length
        self.reads = Counter()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads[int(index)] += 1
        return np.int32(index)


def with_noise(element, random):
    return {"row": element, "noise": np.float32(random.random())}


def augmented(records):
    return grain.MapDataset.source(records).seed(3).random_map(with_noise)


def distributed(source, local=range(4), total=4, **options):
    options = {"batch_size": 3, "seed": 5, "prefetch": 0} | options
    return DistributedDataset(source, total_replicas=total, local_replicas=local, **options)


def read(source, epochs=2, **options):
    dataset = distributed(source, **options)
    return [batch for epoch in range(epochs) for batch in dataset.epoch(epoch)]


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize(
    "wrap", [lambda r: r, GrainSource, grain.MapDataset.source], ids=["plain", "source", "dataset"]
)
def test_elements_are_dealt_out_like_rows_of_arrays(wrap, remainder):
    expected = read(np.arange(LENGTH, dtype=np.int32), remainder=remainder)
    found = read(wrap(Records()), remainder=remainder)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, Masked) == (remainder == "pad")
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("count", [2, 4])
def test_replicas_read_the_same_elements_with_the_same_noise_on_any_number_of_instances(count):
    local = 4 // count
    parts = [read(augmented(Records()), local=range(i * local, (i + 1) * local)) for i in range(count)]
    for alone, *shares in zip(read(augmented(Records())), *parts, strict=True):
        for leaf in ("row", "noise"):
            np.testing.assert_array_equal(alone[leaf], np.concatenate([share[leaf] for share in shares]))


def test_noise_belongs_to_the_element_and_the_epoch_and_not_to_the_replica():
    def noise(batches):
        return [dict(zip(b["row"].tolist(), b["noise"].tolist(), strict=True)) for b in batches]

    of_four = noise(read(augmented(Records(24)), total=4))
    of_two = noise(read(augmented(Records(24)), total=2, local=range(2)))
    epochs = [[part for batch in epoch for part in batch.items()] for epoch in (of_four[:2], of_four[2:])]
    assert sorted(epochs[0]) == sorted(part for batch in of_two[:4] for part in batch.items())
    first, second = map(dict, epochs)
    assert first.keys() == second.keys() == set(range(24))
    assert all(first[row] != second[row] for row in range(24))


def test_an_instance_reads_only_the_elements_of_its_replicas():
    records = Records(24)
    batches = read(GrainSource(records), local=[2], epochs=1)
    assert sorted(records.reads) == sorted(int(row) for batch in batches for row in batch)
    first = set(map(int, batches[0]))
    assert all(count == 1 + (row in first) for row, count in records.reads.items())  # the first batch is read twice


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_restored_epoch_reads_nothing_again(prefetch):
    dataset = distributed(augmented(Records()), prefetch=prefetch)
    batches = dataset.epoch(1)
    for _ in range(4):
        next(batches)
    saved = json.dumps(dataset.position().to_dict())
    rest = list(batches)
    records = Records()
    resumed = distributed(augmented(records), prefetch=prefetch)
    resumed.restore(Position.from_dict(json.loads(saved)))
    for ours, theirs in zip(resumed.epoch(1), rest, strict=True):
        np.testing.assert_array_equal(ours["noise"], theirs["noise"])
    assert records.reads.total() == len(rest) * 12 + 12  # the first batch is read twice


def test_taking_a_batch_is_no_collective_call(on_instances):
    def one_reads(strategy):
        dataset = strategy.distribute_dataset(augmented(Records()), batch_size=3)
        return len(list(dataset.epoch(0))) if strategy.instance_index == 0 else len(dataset)

    assert on_instances(2, 4, one_reads) == [6, 6]


def test_elements_of_other_replicas_are_read_after_a_loss():
    whole = read(augmented(Records()), epochs=1)
    dataset = distributed(augmented(Records()), local=range(2))
    with closing(dataset.epoch(0)) as batches:
        next(batches)
        dataset.redistribute(range(4))
        np.testing.assert_array_equal(dataset.read_again()["noise"], whole[0]["noise"])
        for ours, theirs in zip(batches, whole[1:], strict=True):
            np.testing.assert_array_equal(ours["noise"], theirs["noise"])


def test_a_strategy_takes_a_grain_source_and_moves_batches_to_the_device():
    strategy = IPUStrategy(num_replicas=4)
    dataset = strategy.distribute_dataset(augmented(Records()), 3, gradient_accumulation_count=2)
    assert (len(dataset), dataset.dropped) == (3, 5)
    batch = next(dataset.epoch(0))
    assert batch["row"].device == strategy.replicas.devices.devices[0]
    assert batch["row"].shape == (4 * 2 * 3,)


def test_sequential_datasets_of_grain_are_iterables():
    batches = read(grain.MapDataset.range(24).to_iter_dataset(), epochs=1)
    assert [batch.tolist() for batch in batches] == [
        [start + replica + 4 * k for replica in range(4) for k in range(3)] for start in (0, 12)
    ]


@pytest.mark.complete
def test_grain_is_imported_on_first_use(in_new_process):
    program = """
import sys, numpy, strategies
strategy = strategies.IPUStrategy(num_replicas=2)
next(strategy.distribute_dataset(numpy.arange(8), 2).epoch(0))
print("grain" in sys.modules, "absl" in sys.modules and "absl.flags" in sys.modules)
"""
    assert in_new_process(program).split()[0] == "False"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: GrainSource(3), TypeError, "dataset is a int; use a grain.MapDataset, or an object with a length"),
        (lambda: GrainSource(Records(), num_workers=-1), ValueError, "num_workers is -1; it must be at least 0"),
        (lambda: GrainSource(Records(), 1, 0), ValueError, "worker_buffer_size is 0; it must be at least 1"),
        (lambda: GrainSource(augmented(Records()).to_iter_dataset()), TypeError, "can only be read from its beginning"),
        (lambda: GrainSource(augmented(Records()).repeat()), ValueError, "repeats forever; leave repeat.. out"),
        (lambda: distributed(GrainSource(Records(11))), ValueError, "one global batch takes 12 elements"),
        (
            lambda: read(grain.MapDataset.source(Records()).filter(lambda row: row > 3)),
            ValueError,
            "element [0-3] of epoch 0 is missing: a filter removed it",
        ),
    ],
)
def test_datasets_that_cannot_be_dealt_out_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_program_without_a_main_guard_is_refused_in_its_workers(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    for refused in (lambda: GrainSource(Records()), popdist.initializeBackend):
        with pytest.raises(LifeCycleError, match="if __name__ == '__main__'"):
            refused()


WORKERS = """
import os, select, signal, sys
import grain, numpy as np
from strategies.data.datasets import DistributedDataset
from strategies import GrainSource, Position

class Records:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return np.int32(index)

def watched(element, random):
    import jax._src.xla_bridge as bridge
    assert not bridge.backends_are_initialized()
    assert ("OMPI_COMM_WORLD_RANK" in os.environ) == (os.getpid() == PARENT)
    if element == FAILS:
        raise OSError("record 7 is broken")
    return {"noise": np.float32(random.random()), "pid": np.int64(os.getpid())}

FAILS = -1
PARENT = os.getpid()
def batches(num_workers, epochs=(0, 1), position=None):
    source = grain.MapDataset.source(Records()).seed(3).random_map(watched)
    dataset = DistributedDataset(
        GrainSource(source, num_workers), batch_size=2, total_replicas=4, local_replicas=[1, 2], seed=1
    )
    if position is not None:
        dataset.restore(position)
    for epoch in epochs:
        for batch in dataset.epoch(epoch):
            yield batch, dataset.position()

def has_ended(pid):
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    return bool(select.select([process], [], [], 60)[0])

alone = [batch["noise"].tolist() for batch, _ in batches(0)]
pids, found, positions = set(), [], []
for batch, position in batches(2):
    pids |= set(batch["pid"].tolist())
    found.append(batch["noise"].tolist())
    positions.append(position)
assert found == alone, (found, alone)
assert len(pids) == 2 and os.getpid() not in pids, "the same two for both epochs"
assert all(map(has_ended, pids)), "closed with their data set"

FAILS = 7
resumed = batches(1, [1], positions[len(alone) // 2 + 1])
rest = []
try:
    for batch, _ in resumed:
        rest.append(batch["noise"].tolist())
except OSError as error:
    print(error, flush=True)
assert rest == alone[len(alone) // 2 + 2 :][: len(rest)]

FAILS = -1
left = batches(1)
print(next(left)[0]["pid"][0], flush=True)
signal.pause()
"""


@pytest.mark.complete
@pytest.mark.timeout(300)
def test_worker_processes_read_the_same_and_end_with_a_killed_instance():
    program = subprocess.Popen(
        [sys.executable, "-c", WORKERS],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMPI_COMM_WORLD_RANK": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        try:
            assert program.stdout.readline().startswith("record 7 is broken")
            worker = int(program.stdout.readline())
        finally:
            program.send_signal(signal.SIGKILL)
    assert has_ended(worker), f"worker {worker} is left behind"


def has_ended(pid):
    """Return whether a process, which is no child of this one, ends in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([process], [], [], LIMIT_S)
    os.close(process)
    return bool(ended)
