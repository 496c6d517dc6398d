"""Data sets whose elements draw from the global generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import pickle
import random
import sys
import threading

import numpy as np
import pytest
import torch
from torch_modules import sgd_trainer

import strategies
import strategies.torch
from strategies.compat import poptorch
from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import prefetched
from strategies.data.randomness import DrawWatch, lay, lifted
from strategies.torch.data import CollatedSource

ROWS, BATCH = 24, 2
NO_TENSORS = {"collate_fn": list}  # a worker that ends just after it has sent a tensor may leave a folder of its own


class Rows:
    """Elements `(index, numbers drawn by `draw`)`.

    Attributes:
        readers: The threads that have read elements.
    """

    def __init__(self, draw):
        self.draw, self.readers = draw, []

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.readers.append(threading.current_thread())
        return {"index": np.int64(index), "drawn": self.draw(index)}


def of_python(index):
    return np.float64(random.random())


def of_numpy(index):
    return np.float64(np.random.rand())  # noqa: NPY002


def of_torch(index):
    return np.float64(torch.rand(()).item())


def of_all(index):
    return np.float64(random.random() + np.random.rand() + torch.rand(()).item())  # noqa: NPY002


def of_none(index):
    return np.float64(0)


def epoch_of(dataset, epoch):
    """Return what each element has drawn in an epoch, by its index; instances may not share elements."""
    found = {}
    for batch in dataset.epoch(epoch):
        found |= dict(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True))
    return found


def shard(rows, local, prefetch=2, epoch=0, seed=3):
    dataset = DistributedDataset(
        rows, batch_size=BATCH, total_replicas=4, local_replicas=local, seed=seed, prefetch=prefetch
    )
    return epoch_of(dataset, epoch)


@pytest.mark.parametrize("draw", [of_python, of_numpy, of_torch, of_all])
def test_an_element_draws_the_same_on_any_number_of_instances(draw):
    whole = shard(Rows(draw), range(4))
    assert len(set(whole.values())) == ROWS
    random.seed(7), np.random.seed(7), torch.manual_seed(7)  # noqa: NPY002
    parts = [shard(Rows(draw), [replica]) for replica in range(4)]
    assert {index: drawn for part in parts for index, drawn in part.items()} == whole
    assert shard(Rows(draw), range(4), epoch=1) != whole
    assert shard(Rows(draw), range(4), seed=4) != whole


def test_reading_leaves_the_programs_generators_as_they_are():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = [of_all(0) for _ in range(3)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    found = [of_all(0)]
    batches = strategies.LocalStrategy(4).distribute_dataset(Rows(of_all), batch_size=BATCH).epoch(0)
    for _ in range(2):
        next(batches)
        found.append(of_all(0))
    assert found == expected


@pytest.mark.parametrize(("draw", "is_ahead"), [(of_none, True), (of_numpy, False)])
def test_only_elements_that_draw_nothing_are_read_ahead_in_a_thread(draw, is_ahead):
    rows = Rows(draw)
    shard(rows, range(4))
    here = [reader is threading.current_thread() for reader in rows.readers]
    first = 4 * BATCH  # elements that are read twice
    assert here == [True] * 2 * first + [not is_ahead] * (ROWS - first)


def test_an_epoch_that_goes_on_draws_the_same():
    dataset = DistributedDataset(Rows(of_torch), batch_size=BATCH, total_replicas=4, local_replicas=range(4))
    whole = [batch["drawn"].tolist() for batch in dataset.epoch(0)]
    batches = dataset.epoch(0)
    next(batches)
    position = dataset.position()
    batches.close()
    dataset.restore(position)
    assert [batch["drawn"].tolist() for batch in dataset.epoch(0)] == whole[1:]


def test_a_batch_that_is_read_again_for_other_replicas_draws_the_same():
    dataset = DistributedDataset(Rows(of_all), batch_size=BATCH, total_replicas=4, local_replicas=range(4))
    whole = [batch["drawn"].tolist() for batch in dataset.epoch(0)]
    dataset.redistribute([0, 1])
    batches = dataset.epoch(0)
    next(batches), next(batches)
    dataset.redistribute([2, 3])
    assert dataset.read_again()["drawn"].tolist() == whole[1][2 * BATCH :]
    batches.close()


def masked(elements):
    """Collate as for a masked language model, with numbers that the collation draws."""
    return {"mask": torch.rand(len(elements))}


def test_a_collation_draws_the_same_on_any_number_of_instances():
    def masks(local):
        source = CollatedSource(Rows(of_none), masked)
        dataset = DistributedDataset(source, batch_size=BATCH, total_replicas=4, local_replicas=local)
        return [[part["mask"].tolist() for part in batch.parts] for batch in dataset.epoch(0)]

    whole = masks(range(4))
    assert len({tuple(mask) for step in whole for mask in step}) == ROWS // BATCH
    for replica in range(4):
        assert masks([replica]) == [[step[replica]] for step in whole]


class Drawn(torch.utils.data.Dataset):
    """Elements for PyTorch's loader, whose workers import this module."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index, of_all(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_seeds_the_elements_of_a_loader(workers):
    strategy = strategies.LocalStrategy(2)
    sampler = strategies.torch.DistributedSampler(Drawn(), strategy, batch_size=3)
    rows = sampler.seeded(Drawn())
    size = sampler.instance_batch_size
    loader = torch.utils.data.DataLoader(rows, size, sampler=sampler, num_workers=workers, **NO_TENSORS)

    def drawn(epoch):
        sampler.set_epoch(epoch)
        return {index: drawn for batch in loader for index, drawn in batch}

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = drawn(0)
    assert len(first) == len(rows) == ROWS
    assert drawn(1) != first
    assert drawn(0) == first == {index: rows[index][1] for index in first}
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    "settings", [{}, {"num_workers": 2}, {"num_workers": 1, "mode": poptorch.DataLoaderMode.Async}]
)
def test_elements_of_poptorchs_loader_draw_by_seed_epoch_and_element(settings):
    def loaded():
        options = poptorch.Options().randomSeed(2)
        loader = poptorch.DataLoader(options, Drawn(), batch_size=3, shuffle=True, **settings, **NO_TENSORS)
        return [{index: drawn for batch in loader for index, drawn in batch} for _ in "12"]

    first, second = loaded()
    assert len(first) == ROWS
    assert all(first[index] != second[index] for index in first)
    torch.rand(3), random.random()
    assert loaded() == [first, second]


def test_an_index_of_an_epoch_can_be_pickled():
    sampler = strategies.torch.DistributedSampler(Drawn(), strategies.LocalStrategy(2), batch_size=3)
    sampler.set_epoch(4)
    row = pickle.loads(pickle.dumps(next(iter(sampler))))
    assert (row.epoch, row) == (4, next(iter(sampler)))


def test_a_thread_that_reads_ahead_draws_the_numbers_of_the_program_while_no_replica_computes():
    """The generators are those of the process, which replicas seed while they compute."""
    computing, met = [], []

    def drawn():
        for _ in range(12):
            met.extend(computing)
            batch = np.random.rand(8, 64).astype(np.float32)
            for _ in range(50):  # which takes longer than a replica's turn
                batch = np.tanh(batch @ np.eye(64, dtype=np.float32))
                met.extend(computing)
            yield torch.from_numpy(batch)

    def loss_fn(module, batch):
        computing.append(1)
        for _ in range(20):
            loss = module(batch).square().mean() * np.random.rand()
        computing.pop()
        return loss

    def losses(batches):
        torch.manual_seed(0)
        trainer = sgd_trainer(4, torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)), loss_fn)
        return [trainer.step(batch)["loss"] for batch in batches]

    np.random.seed(1)
    expected = losses(list(drawn()))
    np.random.seed(1)
    assert losses(prefetched(drawn(), 2)) == expected
    assert met == []


def test_states_can_be_compared_while_another_thread_takes_them_away():
    """NumPy's generator is another one for an instant, whose state cannot be read."""
    before = sys.getswitchinterval()
    is_over = threading.Event()

    def take_away():
        while not is_over.is_set():
            lay(lifted())

    thread = threading.Thread(target=take_away)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(300):
            watch = DrawWatch()
            watch.begin()
            watch.look()
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before)
