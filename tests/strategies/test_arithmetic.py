"""Stochastic rounding with given random numbers, and clipping."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from strategies import clip_by_global_norm
from strategies.jax.updates.update import add_stochastically, round_stochastically

DTYPES = {"bfloat16": (ml_dtypes.bfloat16, 16), "float16": (np.float16, 13)}


def rounded(value, dtype, bits):
    return float(round_stochastically(jnp.full(1, value, jnp.float32), dtype, jnp.full(1, bits, jnp.uint32))[0])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_share_of_numbers_rounded_up_equals_the_distance(name, sign):
    dtype, dropped = DTYPES[name]
    step = float(np.finfo(dtype).eps if name == "float16" else 2.0**-7)  # between 1 and the next number
    quarter = sign * (1 + step / 4)
    below, above = (sign * np.float32(number) for number in (1, 1 + step))
    exact = 3 << 30  # the first of 2**32 random numbers that rounds a quarter up
    assert rounded(quarter, dtype, exact - 1) == below
    assert rounded(quarter, dtype, exact) == above
    assert rounded(quarter, dtype, 0xFFFFFFFF) == above
    assert rounded(quarter, dtype, 0) == below


@pytest.mark.parametrize("name", DTYPES)
def test_representable_numbers_are_not_rounded(name):
    dtype, _ = DTYPES[name]
    for value in (0.0, 1.0, -2.5, np.inf, -np.inf):
        assert {rounded(value, dtype, bits) for bits in (0, 0xFFFFFFFF)} == {value}
    assert np.isnan(rounded(np.nan, dtype, 0xFFFFFFFF))


def test_numbers_below_the_normal_ones_of_float16_go_to_the_nearest():
    assert {rounded(2.0**-24 * 1.75, np.float16, bits) for bits in (0, 0xFFFFFFFF)} == {2.0**-23}


def test_variables_of_16_bits_are_rounded_by_chance_and_others_to_the_nearest():
    asked = []

    def bits_of(number, leaf):
        asked.append((number, leaf.dtype.name))
        return jnp.full(leaf.shape, 0xFFFFFFFF, jnp.uint32)

    variables = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.ones(2, jnp.float16)}
    changes = {name: jnp.full(2, 2.0**-20, jnp.float32) for name in variables}
    after = add_stochastically(variables, changes, bits_of)
    assert asked == [(1, "bfloat16"), (2, "float16")]
    assert {name: leaf.dtype for name, leaf in after.items()} == {name: leaf.dtype for name, leaf in variables.items()}
    assert float(after["a"][0]) == 1 + 2.0**-20
    assert float(after["b"][0]) == 1 + 2.0**-7
    assert float(after["c"][0]) == 1 + 2.0**-10


# ---- clipping by the norm of all gradients, which the caller gives


GRADIENTS = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(-4.0, jnp.bfloat16)}  # their norm is 5


@pytest.mark.parametrize(("most", "factor"), [(10.0, 1.0), (5.0, 1.0), (2.5, 0.5)])
def test_gradients_are_scaled_down_if_their_norm_is_larger(most, factor):
    clip = clip_by_global_norm(most)
    clipped, _ = clip.update(GRADIENTS, clip.init(GRADIENTS), gradient_norm=jnp.float32(5))
    assert clipped["a"].tolist() == [3 * factor, 0]
    assert float(clipped["b"]) == -4 * factor
    assert [clipped[name].dtype for name in "ab"] == [jnp.float32, jnp.bfloat16]


def test_clipping_matches_optax_for_the_same_norm():
    ours, theirs = clip_by_global_norm(1.5), optax.clip_by_global_norm(1.5)
    wide = {name: leaf.astype(jnp.float32) for name, leaf in GRADIENTS.items()}
    mine, _ = ours.update(wide, ours.init(wide), gradient_norm=jnp.float32(5))
    other, _ = theirs.update(wide, theirs.init(wide))
    np.testing.assert_allclose(mine["a"], other["a"], rtol=1e-6)


def test_clipping_uses_the_given_norm_and_not_that_of_a_part():
    clip = clip_by_global_norm(1.0)
    clipped, _ = clip.update({"a": jnp.ones(1)}, clip.init(None), gradient_norm=jnp.float32(4))
    assert clipped["a"].tolist() == [0.25]


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_not_above_zero_is_refused(most):
    with pytest.raises(ValueError, match="max_norm is .*; it must be above 0"):
        clip_by_global_norm(most)
