"""Analysis of traced functions that compute each element by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies.jax.programs.jaxpr import first_across_elements, operations

X = jnp.ones((3, 4))
PLACES = np.arange(12, dtype=np.float32).reshape(3, 4)


def first(function, *arguments):
    return first_across_elements(jax.make_jaxpr(function)(*(arguments or (X,))))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sqrt(x) * 2 + x**3,
        lambda x: jnp.where(x > 0, x, -x),
        lambda x: jax.jit(jnp.tanh)(x) / jnp.float32(3),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x),
        lambda x: jax.lax.reduce_precision(x, 8, 7),
        lambda x: jax.lax.map(lambda row: 2 * row, x),
    ],
)
def test_functions_of_single_elements_are_recognised(function):
    assert first(function) is None


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x / jnp.sum(x), "reduce_sum of float32[3,4]"),
        (lambda x: x @ x.T, "transpose of float32[3,4]"),
        (lambda x: x - x[0], "slice of float32[3,4]"),
        (lambda x: jnp.cumsum(x), "cumsum of float32[12]"),
        (lambda x: jax.jit(jnp.max)(x) * x, "reduce_max of float32[3,4]"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sort(y), x), "sort of float32[3,4]"),
        (lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + abs(b), (0,)) * x, "reduce of float32[3,4]"),
        (lambda x: x.at[0].multiply(2), "scatter-mul of float32[3,4]"),
        (lambda x: x * jnp.arange(4.0), "iota, which depends on the places of elements"),
        (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "which depends on the places of elements"),
        (lambda x: jax.pure_callback(np.sort, x, x), "pure_callback of float32[3,4]"),
        (lambda x: jax.lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), "pad of float32[3,4]"),
        (lambda x: jax.lax.scan(lambda y, row: (y + row,) * 2, jnp.zeros(4), x)[1], "scan of float32[3,4]"),
        (lambda x: x * PLACES, "an array of constants"),
        (lambda x: jax.jit(lambda y: y * PLACES)(x), "an array of constants"),
    ],
)
def test_operations_across_elements_are_named_even_inside_loops_and_calls(function, found):
    assert found.split(" of ")[0] in first(function) or found in first(function)


def test_scalars_can_be_combined():
    assert first(lambda x, s: x * (s + 1), X, jnp.float32(2)) is None


def test_operations_are_listed_with_the_numbers_they_take():
    one, other = (operations(jax.make_jaxpr(lambda x, c=c: x * c + 1.0)(X)) for c in (2.0, 3.0))
    assert one == [(), ("mul", "2.0:f32[]"), ("add", "1.0:f32[]")] or [name for name, *_ in one[1:]] == ["mul", "add"]
    assert one != other
