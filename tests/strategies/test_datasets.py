"""Data sets of replicas: the same rows on any number of instances."""

import logging

import numpy as np
import pytest
from feed_data import Unsized

from collectives.backends.thread import run_on_threads
from strategies.data.datasets import DistributedDataset
from strategies.data.layout import Position
from strategies.data.sources import InputContext, Masked

TOTAL = 8


def instances(total, count):
    """Return the blocks of replicas that `count` instances drive."""
    local = total // count
    return [range(i * local, (i + 1) * local) for i in range(count)]


def read(source, *, total=TOTAL, local=None, epochs=1, batch_size=3, **options):
    local = range(total) if local is None else local
    dataset = DistributedDataset(source, batch_size=batch_size, total_replicas=total, local_replicas=local, **options)
    return [batch for epoch in range(epochs) for batch in dataset.epoch(epoch)]


def per_replica(batches, local, batch_size=3):
    """Return the elements of each replica in order, by replica."""
    return {
        r: [int(x) for batch in batches for x in batch[j * batch_size : (j + 1) * batch_size]]
        for j, r in enumerate(local)
    }


class Shards:
    """A source whose shard r of n has elements r, r + n, ...; lengths exist only if `sized`."""

    def __init__(self, elements, sized=False):
        self.elements = elements
        self.sized = sized

    def shard(self, n, i):
        own = self.elements[i::n]
        return own if self.sized else Unsized(own)


class Values:
    def __init__(self, *values):
        self.values = values


KINDS = {
    "arrays": lambda n: np.arange(n),
    "iterable": lambda n: Unsized(range(n)),
    "list": lambda n: list(range(n)),
    "shards": lambda n: Shards(range(n)),
    "sized shards": lambda n: Shards(range(n), sized=True),
}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [24, 77, 101])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("kind", ["arrays", "iterable", "list", "sized shards"])
def test_a_replica_reads_the_same_elements_on_any_number_of_instances(kind, count, length, remainder):
    def rows(local):
        batches = read(KINDS[kind](length), local=local, epochs=2, remainder=remainder, prefetch=0)
        values = [b.values if remainder == "pad" else b for b in batches]
        masks = [b.mask if remainder == "pad" else np.ones(len(b), bool) for b in batches]
        return per_replica(values, local), per_replica(masks, local)

    values, masks = {}, {}
    for local in instances(TOTAL, count):
        own_values, own_masks = rows(local)
        values |= own_values
        masks |= own_masks
    assert (values, masks) == rows(range(TOTAL))


@pytest.mark.parametrize("total", [1, 3, 6, 7])
def test_numbers_that_are_no_powers_of_two(total):
    expected = per_replica(read(np.arange(101), total=total, batch_size=5), range(total), 5)
    for local in instances(total, total):
        assert per_replica(read(np.arange(101), total=total, local=local, batch_size=5), local, 5) == {
            local[0]: expected[local[0]]
        }


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_element_is_read_at_most_once_per_epoch(kind):
    elements = np.concatenate(read(KINDS[kind](77)))
    assert len(elements) == len(set(elements)) == 72
    assert set(elements) <= set(range(77))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_padding_reads_every_unmasked_element_exactly_once(kind):
    batches = read(KINDS[kind](77), remainder="pad")
    assert all(isinstance(batch, Masked) and batch.mask.dtype == bool for batch in batches)
    assert {batch.values.shape for batch in batches} == {batch.mask.shape for batch in batches} == {(24,)}
    seen = np.concatenate([batch.values[batch.mask] for batch in batches])
    assert sorted(seen) == list(range(77))


def test_a_global_batch_is_cut_out_of_one_permutation_in_replica_order():
    batches = read(np.arange(100), total=4, batch_size=5)
    order = np.concatenate(batches)
    assert len(batches) == 5
    assert sorted(order) == list(range(100))
    assert list(order) != sorted(order)
    local = read(np.arange(100), total=4, local=range(1, 3), batch_size=5)
    assert [list(b) for b in local] == [list(b[5:15]) for b in batches]


def test_the_permutation_never_changes():
    assert list(read(np.arange(8), total=1, batch_size=8, seed=3)[0]) == [0, 4, 7, 1, 5, 6, 3, 2]


def test_without_shuffling_elements_come_in_order():
    assert list(np.concatenate(read(np.arange(50), total=2, batch_size=5, shuffle=False))) == list(range(50))


def test_epochs_and_seeds_give_different_orders():
    dataset = DistributedDataset(np.arange(64), batch_size=64, total_replicas=1, local_replicas=range(1))
    orders = [tuple(next(dataset.epoch(e))) for e in (0, 1, 2, 0)]
    assert len(set(orders)) == 3
    assert orders[0] == orders[3]
    assert tuple(read(np.arange(64), total=1, batch_size=64, seed=1)[0]) not in orders


def test_leaves_of_a_pytree_stay_together():
    x = np.arange(60, dtype=np.float32).reshape(30, 2)
    for batch in read({"x": x, "more": (x[:, 0].astype(np.int8), x[:, 1:])}, total=2, batch_size=4):
        assert batch["x"].shape == (8, 2)
        assert batch["x"].dtype == np.float32
        assert batch["more"][0].dtype == np.int8
        np.testing.assert_array_equal(batch["x"][:, 0], batch["more"][0])
        np.testing.assert_array_equal(batch["x"][:, 1:], batch["more"][1])


def test_elements_can_be_pytrees():
    elements = [{"image": np.full((2, 2), k), "label": k} for k in range(8)]
    (first, _) = read(elements, total=2, batch_size=2)
    assert first["image"].shape == (4, 2, 2)
    assert list(first["label"]) == [0, 2, 1, 3]


def test_one_iterable_per_local_replica():
    batches = read(Values([1, 2, 3, 4, 5], Unsized([10, 20, 30, 40])), total=4, local=range(2, 4), batch_size=2)
    assert [list(batch) for batch in batches] == [[1, 2, 10, 20], [3, 4, 30, 40]]


@pytest.mark.parametrize(
    ("length", "remainder", "steps", "dropped"),
    [(24, "drop", 1, 0), (47, "drop", 1, 23), (48, "drop", 2, 0), (49, "pad", 3, 0), (5, "pad", 1, 0)],
)
@pytest.mark.parametrize("kind", ["arrays", "list"])
def test_length_and_dropped_elements(kind, length, remainder, steps, dropped):
    dataset = DistributedDataset(
        KINDS[kind](length),
        batch_size=3,
        total_replicas=8,
        local_replicas=range(8),
        remainder=remainder,
    )
    assert (len(dataset), dataset.dropped) == (steps, dropped)
    assert len(list(dataset.epoch(0))) == steps


def test_steps_of_shards_follow_from_the_shortest_and_when_padding_from_the_longest():
    class Uneven:
        def shard(self, n, i):
            return [i] * (4 + 3 * i)

    assert [len(read(Uneven(), total=3, local=range(r, r + 1))) for r in range(3)] == [1, 1, 1]
    assert [len(read(Uneven(), total=3, local=range(r, r + 1), remainder="pad")) for r in range(3)] == [4] * 3


def test_lengths_of_shards_follow_from_the_source_if_shards_have_none():
    class Sized(Shards):
        def __len__(self):
            return len(self.elements)

    dataset = DistributedDataset(Sized(range(30)), batch_size=3, total_replicas=4, local_replicas=range(2))
    assert (len(dataset), dataset.dropped) == (2, 6)


def test_dropped_elements_are_logged_once(caplog):
    caplog.set_level(logging.INFO)
    read(np.arange(77), epochs=3)
    (record,) = caplog.records
    assert record.getMessage() == ("5 of 77 elements are dropped in every epoch: they do not fill a global batch of 24")


def test_a_source_without_length_has_none():
    dataset = DistributedDataset(Unsized([1]), batch_size=1, total_replicas=1, local_replicas=range(1))
    assert dataset.dropped is None
    with pytest.raises(TypeError, match="does not give its number of elements"):
        len(dataset)


def test_a_length_that_promises_too_much_is_an_error():
    class Liar(Unsized):
        def __len__(self):
            return 100

    with pytest.raises(ValueError, match=r"replicas 0, 1 ended after 2 of 25 steps, before their len\(\)"):
        read(Liar(range(10)), total=2, batch_size=2)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_restored_position_continues_exactly(kind, prefetch):
    def make():
        return DistributedDataset(
            KINDS[kind](80),
            batch_size=2,
            total_replicas=4,
            local_replicas=range(4),
            seed=5,
            prefetch=prefetch,
        )

    whole = make()
    expected = [(e, list(b)) for e in range(3) for b in whole.epoch(e)]
    for consumed in range(len(expected)):
        first = make()
        stream = ((e, list(b)) for e in range(3) for b in first.epoch(e))
        assert [next(stream) for _ in range(consumed)] == expected[:consumed]
        stream.close()
        position = first.position()
        assert (position.epoch * 10 + position.step) == consumed
        second = make()
        second.restore(Position.from_dict(position.to_dict()))
        assert second.position() == position
        rest = [(e, list(b)) for e in range(position.epoch, 3) for b in second.epoch(e)]
        assert rest == expected[consumed:]


def test_a_position_is_at_the_next_epoch_once_the_loop_has_ended():
    dataset = DistributedDataset(np.arange(4), batch_size=2, total_replicas=1, local_replicas=range(1))
    inside = [(dataset.position().epoch, dataset.position().step) for _ in dataset.epoch(7)]
    assert inside == [(7, 1), (7, 2)]
    assert (dataset.position().epoch, dataset.position().step) == (8, 0)


class Reshuffled:
    """A loader that draws another order in each pass, and once more at the end of a pass."""

    def __init__(self, length):
        self._random, self._length, self.begun = np.random.default_rng(3), length, 0

    def __len__(self):
        return self._length

    def __iter__(self):
        self.begun += 1
        yield from self._random.permutation(self._length)
        self._random.random()


class ReshuffledShards:
    def shard(self, replicas, replica):
        return Reshuffled(20)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("make", [lambda: Reshuffled(41), ReshuffledShards])
@pytest.mark.parametrize("n", [1, 2])
def test_a_loader_that_shuffles_itself_goes_on_with_the_order_of_its_pass(make, n, remainder):
    def dataset(rank, communicator=None):
        local = range(4)[rank * 4 // n : (rank + 1) * 4 // n]
        given = {"batch_size": 2, "total_replicas": 4, "local_replicas": local, "remainder": remainder}
        return DistributedDataset(make(), **given, communicator=communicator)

    def of_epochs(dataset, first):
        return [(e, str(batch)) for e in range(first, 4) for batch in dataset.epoch(e)]

    def on_instance(communicator):
        whole = dataset(communicator.rank, communicator)
        expected, positions = [], []
        for e in range(4):
            for batch in whole.epoch(e):
                expected.append((e, str(batch)))
                positions.append(whole.position())
            positions[-1] = whole.position()
        for number, position in enumerate(positions):
            resumed = dataset(communicator.rank, communicator)
            resumed.restore(position)
            assert of_epochs(resumed, position.epoch) == expected[number + 1 :]

    run_on_threads(n, on_instance)


def test_a_loader_without_a_length_is_not_read_before_a_resumed_epoch(caplog):
    first, resumed = (
        DistributedDataset(Unsized(range(40)), batch_size=4, total_replicas=1, local_replicas=range(1))
        for _ in range(2)
    )
    next(first.epoch(1))
    assert not caplog.text
    resumed.restore(first.position())
    assert len(list(resumed.epoch(1))) == 9
    assert "give it a len() if each pass has its own order" in caplog.text


def test_a_restored_epoch_begins_late_only_once():
    dataset = DistributedDataset(np.arange(40), batch_size=4, total_replicas=1, local_replicas=range(1))
    next(dataset.epoch(1))
    dataset.restore(dataset.position())
    assert [len(list(dataset.epoch(e))) for e in (1, 2, 1)] == [9, 10, 10]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "saved with seed 0, but this data set has seed 1"),
        ({"batch_size": 3}, "batch_size 2, .* batch_size 3"),
        ({"total_replicas": 4}, "total_replicas 2, .* total_replicas 4"),
        ({"source": np.arange(41)}, "length 40, .* length 41"),
        ({"shuffle": False, "remainder": "pad"}, "shuffle True, remainder 'drop', .* False, remainder 'pad'"),
    ],
)
def test_a_position_of_another_data_set_is_refused(change, words):
    options = {"source": np.arange(40), "batch_size": 2, "total_replicas": 2, "local_replicas": range(2)}
    position = DistributedDataset(**options).position()
    with pytest.raises(ValueError, match=words):
        DistributedDataset(**options | change).restore(position)


def test_a_position_past_the_end_is_refused():
    dataset = DistributedDataset(np.arange(40), batch_size=4, total_replicas=1, local_replicas=range(1))
    late = Position.from_dict(dataset.position().to_dict() | {"step": 11})
    with pytest.raises(ValueError, match="at step 11 of an epoch of 10 steps"):
        dataset.restore(late)


def test_a_dictionary_that_is_no_position_is_refused():
    with pytest.raises(ValueError, match="is not a position of a data set; a position has epoch, step, seed"):
        Position.from_dict({"epoch": 1})


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ({}, ValueError, "has no arrays"),
        ({"x": np.zeros((0, 2))}, ValueError, "data set is empty"),
        ([], ValueError, "data set is empty"),
        ({"x": np.zeros(50), "y": np.zeros(49)}, ValueError, r"\['x'\] has 50, data set\['y'\] has 49"),
        ({"x": np.zeros(50), "y": 3.0}, ValueError, r"data set\['y'\] is a scalar"),
        ({"x": np.array([None, "a"])}, ValueError, "holds Python objects"),
        (np.zeros(23), ValueError, "takes 24 elements .* has 23; use a batch_size of at most 2"),
        (np.zeros(7), ValueError, "has 7; use at most 7 replicas"),
        (list(range(23)), ValueError, "takes 24 elements"),
        (Shards(range(23), sized=True), ValueError, "batch_size is 3 .* shard 7 of 8 has 2 elements"),
        (Values([1], [2]), ValueError, "got 2 iterables for 8 local replicas"),
        (iter([1, 2]), TypeError, "list_iterator, which can be iterated over only once"),
        (Values(*[iter([1])] * 8), TypeError, "data set of replica 0 is a list_iterator"),
        ("abc", TypeError, "the data set is a str; use a pytree of arrays"),
        (3, TypeError, "the data set is a int"),
        (None, ValueError, "has no arrays"),
    ],
)
def test_bad_sources_are_refused_when_the_data_set_is_made(source, error, words):
    with pytest.raises(error, match=words):
        DistributedDataset(source, batch_size=3, total_replicas=8, local_replicas=range(8))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "batch_size is 0; it must be at least 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size is 2.0; an integer"),
        ({"batch_size": True}, TypeError, "batch_size is True"),
        ({"total_replicas": -1}, ValueError, "total_replicas is -1"),
        ({"local_replicas": range(0)}, ValueError, "local_replicas is empty"),
        ({"local_replicas": range(1, 3)}, ValueError, r"\[2\] do not exist; replicas are numbered 0 to 1"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"prefetch": -1}, ValueError, "prefetch is -1"),
        ({"remainder": "keep"}, ValueError, "'keep' is unknown; use 'drop', 'pad' or 'short'"),
    ],
)
def test_bad_arguments_are_refused(change, error, words):
    options = {"batch_size": 1, "total_replicas": 2, "local_replicas": range(2)} | change
    with pytest.raises(error, match=words):
        DistributedDataset(np.zeros(8), **options)


def test_elements_of_different_shapes_are_an_error():
    with pytest.raises(ValueError, match="cannot be stacked .* same structure and shapes"):
        read([np.zeros(2), np.zeros(3)], total=1, batch_size=2)


def test_place_sees_every_batch_and_its_result_is_yielded():
    assert read(np.arange(4), total=1, batch_size=2, shuffle=False, place=lambda b: b.sum()) == [1, 5]


@pytest.mark.parametrize("kind", ["arrays", "list", "sized shards"])
def test_accumulation_reads_its_micro_batches_one_after_another(kind):
    taken, whole = (
        read(KINDS[kind](101), total=4, batch_size=b, gradient_accumulation_count=n) for b, n in [(3, 2), (6, 1)]
    )
    assert len(taken) == 4
    for batch, one in zip(taken, whole, strict=True):
        assert np.asarray(batch).shape == (4 * 2 * 3,)
        np.testing.assert_array_equal(batch, one)


def test_positions_depend_on_what_a_step_takes_and_not_on_its_division_into_micro_batches():
    def distributed(batch_size, count):
        return DistributedDataset(
            np.arange(50),
            batch_size=batch_size,
            gradient_accumulation_count=count,
            total_replicas=2,
            local_replicas=[1],
        )

    written = distributed(3, 2)
    assert (len(written), written.global_batch_size, written.gradient_accumulation_count) == (4, 12, 2)
    rows = written.epoch(0)
    next(rows)
    rest = distributed(2, 3)
    rest.restore(written.position())
    np.testing.assert_array_equal(next(rest.epoch(0)), next(rows))
    with pytest.raises(ValueError, match="saved with batch_size 6, but this data set has batch_size 9"):
        distributed(3, 3).restore(written.position())


def test_messages_mention_the_accumulation():
    words = r"global batch takes 24 elements \(batch_size 3 x 2 accumulated on each of 4 .* batch_size of at most 2"
    with pytest.raises(ValueError, match=words):
        read(np.arange(23), total=4, gradient_accumulation_count=2)
    with pytest.raises(ValueError, match="gradient_accumulation_count is 0; it must be at least 1"):
        read(np.arange(23), gradient_accumulation_count=0)


def test_global_batch_sizes_are_divided_by_the_replicas():
    assert InputContext(2, 1, 6).get_per_replica_batch_size(48) == 8
    with pytest.raises(ValueError, match="50 is not divisible by 6 replicas; use 48 or 54"):
        InputContext(2, 1, 6).get_per_replica_batch_size(50)
    with pytest.raises(ValueError, match="3 is not divisible by 6 replicas; use 6"):
        InputContext(2, 1, 6).get_per_replica_batch_size(3)
    with pytest.raises(ValueError, match="input_pipeline_id is 2 of 2 pipelines"):
        InputContext(2, 2, 6)
