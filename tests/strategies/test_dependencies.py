"""Something in a compiled program that waits for something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies.programs.xla_pitfalls import behind, is_true


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("value", [0, 1])
def test_what_waits_gets_its_own_value_whatever_it_waits_for(dtype, value):
    waited_for = jnp.full((2, 2), value).astype(dtype)
    found = jax.jit(lambda condition, array: behind(is_true(condition), array))([waited_for], jnp.arange(3.0))
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_also_for_what_is_not_finite(value):
    assert bool(jax.jit(is_true)([jnp.full(1, value)]))


def test_nothing_and_empty_arrays_are_there_at_once():
    assert bool(is_true([]))
    assert bool(is_true([jnp.zeros((0, 3))]))


def test_the_compiler_cannot_leave_it_out():
    def program(waited_for, array):
        return behind(is_true([waited_for]), array)

    text = jax.jit(program).lower(jnp.zeros(3), jnp.ones(3)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert entry.count("parameter(") == 2
    assert "constant(true)" not in entry
