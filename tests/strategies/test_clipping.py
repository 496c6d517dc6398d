"""Clipping by the norm of all gradients, which the caller gives."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from strategies import clip_by_global_norm

GRADIENTS = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(-4.0, jnp.bfloat16)}  # of norm 5


@pytest.mark.parametrize(("most", "factor"), [(10.0, 1.0), (5.0, 1.0), (2.5, 0.5)])
def test_gradients_are_scaled_down_where_their_norm_is_larger(most, factor):
    clip = clip_by_global_norm(most)
    clipped, _ = clip.update(GRADIENTS, clip.init(GRADIENTS), gradient_norm=jnp.float32(5))
    assert clipped["a"].tolist() == [3 * factor, 0]
    assert float(clipped["b"]) == -4 * factor
    assert [clipped[name].dtype for name in "ab"] == [jnp.float32, jnp.bfloat16]


def test_it_is_that_of_optax_for_the_same_norm():
    ours, theirs = clip_by_global_norm(1.5), optax.clip_by_global_norm(1.5)
    wide = {name: leaf.astype(jnp.float32) for name, leaf in GRADIENTS.items()}
    mine, _ = ours.update(wide, ours.init(wide), gradient_norm=jnp.float32(5))
    other, _ = theirs.update(wide, theirs.init(wide))
    np.testing.assert_allclose(mine["a"], other["a"], rtol=1e-6)


def test_the_norm_that_is_given_counts_and_not_that_of_a_part():
    clip = clip_by_global_norm(1.0)
    clipped, _ = clip.update({"a": jnp.ones(1)}, clip.init(None), gradient_norm=jnp.float32(4))
    assert clipped["a"].tolist() == [0.25]


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_not_above_zero_is_refused(most):
    with pytest.raises(ValueError, match="max_norm is .*; it is above 0"):
        clip_by_global_norm(most)
