"""Rows of a table and their gradient, compared with JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strategies


def gradient(take, table, indices, weights):
    return jax.jit(jax.grad(lambda each: jnp.sum(take(each, indices).astype(jnp.float32) * weights)))(table)


def by_index(table, indices):
    return table[indices]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((7, 3), [3, 0, 3, 3, 6, 0]),
        ((7, 3), [[1, -1], [6, -7]]),
        ((5,), [4, 4, 4]),
        ((4, 2, 3), [[0], [3], [3]]),
        ((1, 2), [0, 0, 0, 0, 0]),
        ((3, 2), []),
    ],
)
def test_rows_and_gradients_match_jax(shape, indices, dtype):
    indices = np.array(indices, np.int32)
    table = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
    # Sums of whole numbers are exact.
    weights = jnp.arange(1, 1 + indices.size * int(np.prod(shape[1:])), dtype=jnp.float32)
    weights = weights.reshape(*indices.shape, *shape[1:])
    assert jnp.array_equal(strategies.take_rows(table, indices), table[indices])
    own, plain = (gradient(take, table, indices, weights) for take in (strategies.take_rows, by_index))
    assert own.dtype == dtype
    assert np.array_equal(own, plain)


def test_many_values_of_a_row_are_added_in_float32_and_rounded_once():
    indices = np.zeros(1000, np.int32)
    table = jnp.zeros((2, 1), jnp.bfloat16)
    assert gradient(strategies.take_rows, table, indices, 1.0)[0, 0] == 1000


def test_take_rows_works_in_loops_and_under_recomputation():
    table, indices = jnp.ones((4, 2)), jnp.array([1, 1, 3])

    @jax.checkpoint
    def body(total, _):
        return total + strategies.take_rows(table, indices).sum(), None

    def loss(each):
        return jax.lax.scan(lambda total, _: (total + strategies.take_rows(each, indices).sum(), None), 0.0, None, 3)[0]

    assert body(0.0, None)[0] == 6
    assert np.array_equal(jax.grad(loss)(table), [[0, 0], [6, 6], [0, 0], [3, 3]])


@pytest.mark.parametrize(("table", "indices"), [(np.ones((2, 2), np.int32), [0]), (np.ones((2, 2)), [0.5])])
def test_other_dtypes_are_refused(table, indices):
    with pytest.raises(TypeError, match="take_rows needs floats and integers"):
        strategies.take_rows(table, np.array(indices))
