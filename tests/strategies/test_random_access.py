"""Sources whose elements are read one by one in any order."""

import itertools
import pickle
from contextlib import nullcontext

import numpy as np
import pytest

from strategies.data.datasets import DistributedDataset
from strategies.data.layout import Layout, epoch_order
from strategies.data.sources import RandomAccessSource, Steps, read_elements
from strategies.errors import StrategyError


class Numbers:
    """A source of eight arrays; `change(array)` returns an element, maybe another one in each call."""

    def __init__(self, change):
        self.arrays, self.change = [np.full(2, number, np.float32) for number in range(8)], change

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, index):
        return self.change(self.arrays[index])


def drawn():
    generator = np.random.default_rng(1)
    return lambda array: {"x": array + generator.random()}


def counted():
    calls = itertools.count()
    return lambda array: {"x": array, "call": next(calls)}


def doubled_in_place():
    return lambda array: np.multiply(array, 2, out=array) + 1


def labelled():
    return lambda array: (array, array.sum())


class Squares:
    """A source that records the elements it is asked for."""

    def __init__(self, length):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        return index * index


def steps(length=13, layout=None, shuffle=False):
    layout = layout or Layout(2, 3, [1, 2])
    return Steps(Squares(length), length, layout, seed=4, shuffle=shuffle, read=read_elements)


def test_only_the_elements_of_local_replicas_are_read():
    squares = Squares(13)
    batch = Steps(squares, 13, Layout(2, 3, [1, 2]), seed=4, shuffle=False, read=read_elements).read(1)
    assert batch.tolist() == [64, 81, 100, 121]
    assert squares.asked == [8, 9, 10, 11]


def test_steps_are_counted_from_the_first_epoch_and_each_epoch_has_its_order():
    made = steps(shuffle=True)
    assert made.per_epoch == 2
    for number in (0, 1, 5):  # steps of epochs 0, 0 and 2
        order = epoch_order(13, 4, number // 2)[6 * (number % 2) :][2:6]
        assert made.read(number).tolist() == (order**2).tolist()


def test_a_copy_in_another_process_reads_the_same():
    made = steps(shuffle=True)
    made.read(3)
    copy = pickle.loads(pickle.dumps(made))
    assert [copy.read(number).tolist() for number in (3, 0)] == [made.read(number).tolist() for number in (3, 0)]


def test_an_incomplete_batch_is_padded_on_request():
    batch = steps(7, Layout(2, 2, [1], "pad")).read(1)
    assert (batch.values.tolist(), batch.mask.tolist()) == ([36, 0], [True, False])


def test_too_few_elements_are_refused():
    with pytest.raises(ValueError, match="the data set has 5"):
        steps(5)


def test_an_epoch_can_be_read_from_any_step():
    source = RandomAccessSource(steps(shuffle=True))
    assert (source.length, source.steps, source.is_random_access) == (13, 2, True)
    first, second = source.batches(1, 0)
    assert [batch.tolist() for batch in source.batches(1, 1)] == [second.tolist()]
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(
    ("change", "is_refused"), [(drawn, True), (counted, True), (doubled_in_place, True), (labelled, False)]
)
@pytest.mark.parametrize("local", [range(4), [2, 3]])
def test_an_element_that_differs_when_it_is_read_again_is_refused(change, is_refused, local):
    dataset = DistributedDataset(Numbers(change()), batch_size=1, total_replicas=4, local_replicas=local)
    refused = pytest.raises(StrategyError, match="of the data set is different when it is read again")
    with refused if is_refused else nullcontext():
        assert len(list(dataset.epoch(0))) == 2


@pytest.mark.parametrize("change", [drawn, counted])
def test_elements_that_a_single_replica_reads_may_depend_on_earlier_reads(change):
    dataset = DistributedDataset(Numbers(change()), batch_size=1, total_replicas=1, local_replicas=range(1))
    assert len(list(dataset.epoch(0))) == 8
