"""What training changes, as JAX sees it."""

import jax
import numpy as np

from strategies import LossScaling, TrainState

STATE = TrainState({"w": np.ones(2)}, (np.zeros(1),), 7, LossScaling(8.0).start(), [np.ones(3)])


def test_it_is_a_tree_of_arrays_and_the_step_is_none_of_them():
    assert len(jax.tree.leaves(STATE)) == 1 + 1 + 3 + 1
    doubled = jax.tree.map(lambda leaf: 2 * leaf, STATE)
    assert (doubled.step, doubled.variables["w"].tolist(), float(doubled.loss_scale.scale)) == (7, [2, 2], 16)


def test_it_has_no_scale_and_no_residuals_unless_they_are_used():
    plain = TrainState({}, (), 0)
    assert (plain.loss_scale, plain.residuals) == (None, None)
