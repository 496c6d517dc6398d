"""Sequential sources, dealt to replicas."""

import numpy as np
import pytest

from strategies.data.layout import Layout
from strategies.data.sources import from_iterable, from_shards, from_values


class Once:
    """An iterable without a length that counts its iterations."""

    def __init__(self, elements):
        self.elements, self.begun = elements, 0

    def __iter__(self):
        self.begun += 1
        return iter(self.elements)


class Shards:
    def __init__(self, *lengths):
        self.lengths = lengths

    def shard(self, replicas, replica):
        assert replicas == len(self.lengths)
        return [10 * replica + number for number in range(self.lengths[replica])]


def batches(source, start=0):
    return [np.asarray(batch).tolist() for batch in source.batches(0, start)]


def test_replica_r_takes_every_rth_element():
    assert batches(from_iterable(range(13), Layout(2, 3, [0, 2]))) == [[0, 3, 2, 5], [6, 9, 8, 11]]


@pytest.mark.parametrize("length", [6, 7, 8])
def test_a_round_that_does_not_reach_all_replicas_is_not_begun(length):
    assert batches(from_iterable(Once(range(length)), Layout(1, 3, [0]))) == [[0], [3]]


def test_one_pass_feeds_all_local_replicas_and_every_epoch_restarts():
    elements = Once(range(12))
    source = from_iterable(elements, Layout(2, 3, range(3)))
    assert (source.length, source.steps, elements.begun) == (None, None, 0)
    assert batches(source) == batches(source)
    assert elements.begun == 2


def test_steps_that_were_made_are_skipped():
    source = from_iterable(Once(range(12)), Layout(1, 3, [1]))
    assert batches(source, 2) == [[7], [10]]


def test_padding_repeats_earlier_elements_and_masks_them():
    *_, last = from_iterable(Once(range(7)), Layout(2, 2, range(2), "pad")).batches(0, 0)
    assert (last.values.tolist(), last.mask.tolist()) == ([4, 6, 5, 6], [True, True, True, False])


def test_a_source_with_a_length_knows_its_number_of_steps():
    source = from_iterable(list(range(13)), Layout(2, 3, [0]))
    assert (source.length, source.steps) == (13, 2)


def test_a_length_that_promises_too_much_is_an_error():
    class Liar(Once):
        def __len__(self):
            return 12

    with pytest.raises(ValueError, match=r"the data of replicas 1 ended after 1 of 2 steps, before their len\(\)"):
        batches(from_iterable(Liar(range(6)), Layout(2, 3, [1])))


def test_shards_are_read_side_by_side_until_the_shortest_ends():
    source = from_shards(Shards(4, 5, 9), Layout(2, 3, [1, 2]))
    assert (source.length, source.steps) == (18, 2)
    assert batches(source) == [[10, 11, 20, 21], [12, 13, 22, 23]]


def test_shards_are_padded_until_the_longest_ends():
    source = from_shards(Shards(1, 3), Layout(2, 2, range(2), "pad"))
    assert source.steps == 2
    assert [(batch.values.tolist(), batch.mask.tolist()) for batch in source.batches(0, 0)] == [
        ([0, 0, 10, 11], [True, False, True, True]),
        ([0, 0, 12, 12], [False, False, True, False]),
    ]


def test_a_shard_that_fills_no_batch_is_named():
    with pytest.raises(ValueError, match="batch_size is 3 per replica, but shard 1 of 2 has 2 elements"):
        from_shards(Shards(9, 2), Layout(3, 2, [0]))


def test_an_empty_shard_cannot_be_padded():
    source = from_values([Once([1]), Once([])], Layout(1, 2, range(2), "pad"))
    with pytest.raises(ValueError, match="the data of replica 1 is empty; padding repeats at least one element"):
        batches(source)


def test_each_local_replica_needs_an_iterable():
    with pytest.raises(ValueError, match="got 1 iterables for 2 local replicas"):
        from_values([[1]], Layout(1, 2, range(2)))


@pytest.mark.parametrize("source", ["abc", b"abc", 3, iter([1])])
def test_sources_that_cannot_be_iterated_repeatedly_are_refused(source):
    with pytest.raises(TypeError, match="an iterable$|can be iterated over only once"):
        from_iterable(source, Layout(1, 1, [0]))
