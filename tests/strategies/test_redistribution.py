"""Data sets whose replicas survivors take over in the middle of an epoch."""

import numpy as np
import pytest

from strategies import StrategyError
from strategies.data.datasets import DistributedDataset

REPLICAS = 4
ROWS = 3  # per replica and step
STEPS = 5


class ByIndex:
    """A source whose elements can be read one by one."""

    def __len__(self):
        return STEPS * REPLICAS * ROWS + 1

    def __getitem__(self, index):
        return np.int64(index)


def dataset_of(local_replicas, source=None, **options):
    return DistributedDataset(
        np.arange(len(ByIndex())) if source is None else source,
        batch_size=ROWS,
        total_replicas=REPLICAS,
        local_replicas=local_replicas,
        seed=7,
        **options,
    )


def rows(batch):
    return [row.tolist() for row in np.split(batch, len(batch) // ROWS)]


@pytest.fixture
def of_all():
    """Provide the elements that each replica reads in each step of the epoch."""
    return [rows(batch) for batch in dataset_of(range(REPLICAS)).epoch(2)]


@pytest.mark.parametrize("source", [None, ByIndex()], ids=["arrays", "random access"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("done", [1, 3, STEPS])
def test_the_batch_of_the_last_step_is_read_again_for_other_replicas(of_all, source, prefetch, done):
    dataset = dataset_of(range(1, 2), source, prefetch=prefetch)
    epoch = dataset.epoch(2)
    for step in range(done):
        assert rows(next(epoch)) == of_all[step][1:2]
    dataset.redistribute(range(1, 4))
    assert rows(dataset.read_again()) == of_all[done - 1][1:4]
    assert [rows(batch) for batch in epoch] == [step[1:4] for step in of_all[done:]]
    assert (dataset.position().epoch, dataset.position().step) == (3, 0)


def test_a_data_set_knows_the_batch_that_it_gave_last(of_all):
    dataset = dataset_of(range(2))
    epoch = dataset.epoch(2)
    first, second = next(epoch), next(epoch)
    assert [dataset.has_given(batch) for batch in (first, second, second.copy(), None)] == [False, True, False, False]
    again = dataset.read_again()
    assert dataset.has_given(again)
    assert rows(again) == of_all[1][:2]


def test_a_batch_without_its_mask_is_read_again_without_it(of_all):
    dataset = dataset_of(range(1), remainder="pad")
    batch = next(dataset.epoch(2))
    dataset.redistribute(range(2))
    assert dataset.has_given(batch.values)
    assert rows(dataset.read_again(batch.values)) == of_all[0][:2]


def test_batches_prepared_for_the_old_replicas_are_not_used(of_all):
    dataset = dataset_of(range(2), prefetch=STEPS)
    epoch = dataset.epoch(2)
    next(epoch)
    dataset.redistribute(range(2, 4))
    assert [rows(batch) for batch in epoch] == [step[2:4] for step in of_all[1:]]


def test_redistributing_a_stream_is_refused():
    dataset = dataset_of(range(2), list(range(100)))
    next(dataset.epoch(0))
    with pytest.raises(
        StrategyError, match="the others can take over its part only of data sets of arrays, grain.MapDataset and other"
    ):
        dataset.redistribute(range(4))
