"""Arithmetic of data sharding: the elements of a replica at a step, and the order of an epoch."""

import numpy as np
import pytest

from strategies.argument_checks import at_least, integer, positive
from strategies.data.layout import Layout, epoch_order


def test_a_replica_takes_its_own_part_of_each_global_batch():
    layout = Layout(batch_size=2, total_replicas=3, local_replicas=[1])
    assert [layout.positions(step).tolist() for step in range(2)] == [[2, 3], [8, 9]]


def test_local_replicas_take_adjacent_parts():
    assert Layout(2, 4, range(1, 3)).positions(1).tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("instances", [1, 2, 3, 6])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_all_instances_together_take_every_position_once(instances, remainder):
    local = 6 // instances
    layouts = [Layout(3, 6, range(i * local, (i + 1) * local), remainder) for i in range(instances)]
    steps = layouts[0].steps(77)
    taken = [position for step in range(steps) for layout in layouts for position in layout.positions(step)]
    assert taken == list(range(steps * 18))


@pytest.mark.parametrize(
    ("length", "dropped_steps", "padded_steps", "dropped"),
    [(11, 0, 1, 11), (12, 1, 1, 0), (13, 1, 2, 1), (24, 2, 2, 0)],
)
def test_an_incomplete_batch_is_dropped_or_padded(length, dropped_steps, padded_steps, dropped):
    drops, pads = (Layout(4, 3, [0], remainder) for remainder in ("drop", "pad"))
    assert (drops.steps(length), drops.dropped(length)) == (dropped_steps, dropped)
    assert (pads.steps(length), pads.dropped(length)) == (padded_steps, 0)


@pytest.mark.parametrize(
    ("length", "accumulated", "taken"),
    [(24, 1, 24), (31, 1, 30), (26, 1, 24), (27, 1, 27), (35, 1, 33), (41, 2, 36), (29, 2, 24)],
)
def test_a_last_step_can_be_equally_short_for_all_replicas(length, accumulated, taken):
    """Each of 3 replicas has 4 elements, in one micro-batch or in two."""
    layouts = [Layout(4 // accumulated, 3, [replica], "short", accumulated) for replica in range(3)]
    steps = layouts[0].steps(length)
    found = [[layout.positions(step, length).tolist() for layout in layouts] for step in range(steps)]
    assert [position for step in found for of_one in step for position in of_one] == list(range(taken))
    assert len({len(of_one) for of_one in found[-1]}) == 1
    assert {len(of_one) % accumulated for of_one in found[-1]} == {0}
    assert layouts[0].dropped(length) == length - taken


def test_micro_batches_only_make_a_step_larger():
    accumulated, whole = Layout(3, 2, [1], gradient_accumulation_count=2), Layout(6, 2, [1])
    assert accumulated.elements_per_replica == 6
    assert accumulated.global_batch_size == whole.global_batch_size == 12
    assert accumulated.positions(1).tolist() == whole.positions(1).tolist()
    assert (accumulated.described, whole.described) == ("3 x 2 accumulated", "6")


@pytest.mark.parametrize(
    ("layout", "length", "words"),
    [
        (Layout(4, 3, [0]), 0, "the data set is empty"),
        (Layout(4, 3, [0]), 11, "has 11; use a batch_size of at most 3, or remainder='pad'"),
        (Layout(4, 3, [0]), 2, "has 2; use at most 2 replicas, or"),
        (Layout(4, 3, [0], gradient_accumulation_count=2), 5, "has 5; use at most 5 micro-batches"),
        (Layout(4, 3, [0], "pad"), 0, "the data set is empty"),
    ],
)
def test_a_data_set_that_does_not_fill_one_step_is_refused_with_a_way_out(layout, length, words):
    with pytest.raises(ValueError, match=words):
        layout.check_length(length)


def test_a_data_set_that_fills_one_step_is_not_refused():
    Layout(4, 3, [0]).check_length(12)
    Layout(4, 3, [0], "pad").check_length(1)


def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch(seed):
    orders = {(s, epoch): epoch_order(101, s, epoch) for s in (seed, seed + 1) for epoch in range(2)}
    assert all(sorted(order) == list(range(101)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    assert (epoch_order(101, seed, 1) == orders[seed, 1]).all()
    assert epoch_order(5, seed, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_an_order_is_the_same_for_ever():
    assert epoch_order(8, 3, 0).tolist() == [0, 4, 7, 1, 5, 6, 3, 2]


@pytest.mark.parametrize(
    ("value", "number"), [(3, 3), (np.int64(-2), -2), (np.uint8(7), 7), (True, None), (2.0, None), ("2", None)]
)
def test_only_integers_of_any_library_are_accepted(value, number):
    assert integer(value) == number


def test_a_number_out_of_range_is_named():
    assert (positive("size", 1), at_least(0, "seed", 0)) == (1, 0)
    with pytest.raises(ValueError, match="size is 0; it must be at least 1"):
        positive("size", 0)
    with pytest.raises(TypeError, match=r"size is 1\.5; an integer of at least 1 is needed"):
        positive("size", 1.5)
