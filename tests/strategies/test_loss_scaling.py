"""Loss scale over the steps."""

import jax
import numpy as np
import pytest

from strategies import LossScaling, TrainState
from strategies.loss_scaling import MOST


def scales(scaling, finite):
    state, found = scaling.start(), []
    for is_finite in finite:
        state = scaling.after(state, is_finite)
        found.append((float(state.scale), int(state.good_steps), int(state.skipped)))
    return found


def test_the_scale_grows_after_enough_good_steps_and_counts_anew():
    assert scales(LossScaling(8.0, 2.0, 3), [True] * 4) == [(8, 1, 0), (8, 2, 0), (16, 0, 0), (16, 1, 0)]


def test_an_overflow_lowers_the_scale_and_is_counted():
    found = scales(LossScaling(8.0, 4.0, 3), [True, True, False, True, True, True])
    assert found == [(8, 1, 0), (8, 2, 0), (2, 0, 1), (2, 1, 1), (2, 2, 1), (8, 0, 1)]


def test_the_scale_stays_between_one_and_the_maximum():
    assert scales(LossScaling(2.0, 8.0), [False, False]) == [(1, 0, 1), (1, 0, 2)]
    assert scales(LossScaling(MOST / 2, 8.0, 1), [True, True]) == [(MOST, 0, 0), (MOST, 0, 0)]


def test_an_initial_scale_below_one_is_the_minimum():
    assert scales(LossScaling(0.25, 2.0), [False]) == [(0.25, 0, 1)]


def test_a_static_scale_counts_skipped_steps():
    assert scales(LossScaling(4.0, 1.0, 1), [True, False, True]) == [(4, 1, 0), (4, 0, 1), (4, 1, 1)]


def test_the_state_has_the_dtypes_of_a_compiled_program():
    state = LossScaling().after(LossScaling(8.0).start(), True)
    assert [np.asarray(leaf).dtype for leaf in (state.scale, state.good_steps, state.skipped)] == [
        *(np.float32, np.int32, np.int32)
    ]
    assert str(LossScaling(8.0).start()) == "8"


def test_options_of_programs_are_parsed_into_a_scaling():
    assert LossScaling.parse(None) is None
    assert LossScaling.parse("dynamic") == LossScaling(2.0**15, 2.0, 2000)
    assert LossScaling.parse(128) == LossScaling(128.0, 1.0)
    own = LossScaling(4.0)
    assert LossScaling.parse(own) is own


@pytest.mark.parametrize("scaling", ["static", True, [8]])
def test_values_that_are_no_scaling_are_refused(scaling):
    with pytest.raises(ValueError, match="use None, 'dynamic', a number or a LossScaling"):
        LossScaling.parse(scaling)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"initial": 0.0}, ValueError),
        ({"initial": 2 * MOST}, ValueError),
        ({"initial": float("nan")}, ValueError),
        ({"factor": 0.5}, ValueError),
        ({"factor": float("inf")}, ValueError),
        ({"interval": 0}, ValueError),
        ({"interval": 1.5}, TypeError),
    ],
)
def test_numbers_out_of_range_are_refused(options, error):
    with pytest.raises(error, match=r"loss scale"):
        LossScaling(**options)


# ---- what training changes, as JAX sees it


STATE = TrainState({"w": np.ones(2)}, (np.zeros(1),), 7, LossScaling(8.0).start(), model_state=[np.ones(3)])


def test_a_training_state_is_a_tree_of_arrays_without_the_step():
    assert len(jax.tree.leaves(STATE)) == 1 + 1 + 3 + 1
    doubled = jax.tree.map(lambda leaf: 2 * leaf, STATE)
    assert (doubled.step, doubled.variables["w"].tolist(), float(doubled.loss_scale.scale)) == (7, [2, 2], 16)


def test_a_training_state_has_no_scale_or_model_state_by_default():
    plain = TrainState({}, (), 0)
    assert (plain.loss_scale, plain.model_state) == (None, None)
