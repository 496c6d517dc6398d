"""Sources of one instance: arrays, and common handling of elements."""

import numpy as np
import pytest

from strategies.data.datasets import open_source
from strategies.data.layout import Layout
from strategies.data.sources import Masked, common_length, stacked


def read(arrays, layout, epoch=0, start=0, **options):
    return list(open_source(arrays, layout, **{"seed": 0, "shuffle": False, **options}).batches(epoch, start))


def test_a_step_gathers_the_rows_of_the_local_replicas():
    rows = np.arange(26).reshape(13, 2)
    batches = read({"x": rows, "y": rows[:, 0]}, Layout(2, 3, [1, 2]))
    assert [batch["x"].tolist() for batch in batches] == [rows[2:6].tolist(), rows[8:12].tolist()]
    assert [batch["y"].tolist() for batch in batches] == [[4, 6, 8, 10], [16, 18, 20, 22]]


def test_padding_repeats_the_first_rows_and_masks_them():
    *_, last = read(np.arange(7), Layout(2, 2, range(2), "pad"))
    assert isinstance(last, Masked)
    assert (last.values.tolist(), last.mask.tolist()) == ([4, 5, 6, 0], [True, True, True, False])


def test_reading_can_begin_at_any_step():
    layout = Layout(2, 2, [1])
    whole = read(np.arange(20), layout, epoch=3, shuffle=True, seed=5)
    assert [list(b) for b in read(np.arange(20), layout, epoch=3, start=2, shuffle=True, seed=5)] == [
        list(b) for b in whole[2:]
    ]


def test_no_array_is_used_twice():
    arrays = np.arange(8)
    first, second = read(arrays, Layout(4, 1, [0]))
    first[:] = -1
    assert second.tolist() == [4, 5, 6, 7]
    assert arrays.tolist() == list(range(8))


def test_elements_are_stacked_leaf_by_leaf():
    batch = stacked([{"a": np.ones(2), "b": 3}, {"a": np.zeros(2), "b": 4}])
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([[1, 1], [0, 0]], [3, 4])


@pytest.mark.parametrize("elements", [[np.zeros(2), np.zeros(3)], [{"a": 1}, {"b": 1}]])
def test_elements_that_differ_cannot_be_stacked(elements):
    with pytest.raises(ValueError, match="all need the same structure and shapes"):
        stacked(elements)


def test_arrays_share_their_length():
    assert common_length({"x": np.zeros((5, 2)), "y": np.zeros(5)}) == 5


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "the data set has no arrays"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"data set\['x'\] has 3, data set\['y'\] has 2; all must have the same"),
        ({"x": np.zeros(())}, r"data set\['x'\] is a scalar"),
        ({"x": np.array(["a", None], object)}, r"data set\['x'\] holds Python objects"),
    ],
)
def test_arrays_without_a_common_length_are_refused_by_name(arrays, words):
    with pytest.raises(ValueError, match=words):
        common_length(arrays)
