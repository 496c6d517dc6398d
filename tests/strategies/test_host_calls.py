"""Calls of Python from a compiled program, for arrays of every size."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from strategies.jax.programs.feed_program import call_host

SMALL_BYTES, LARGE_BYTES = 1024, 64 * 1024

ARGUMENTS = {
    "nothing": (),
    "scalars": (np.float32(1.5), np.int32(-2), np.uint32(1 << 31)),
    "other dtypes": (np.array([True, False]), np.arange(3).astype(ml_dtypes.bfloat16), np.int8(-1)),
    "no elements": (np.zeros((0, 3), np.float32), np.float32(4)),
    "large": (np.arange(LARGE_BYTES // 2 + 3, dtype=np.float32).reshape(-1, 1), np.float32(7)),
    "around the limits": tuple(
        np.full(nbytes // 4 + extra, nbytes, np.float32) for nbytes in (SMALL_BYTES, LARGE_BYTES) for extra in (0, 1)
    ),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arrays_arrive_unchanged(kind):
    seen = []

    def program(arguments):
        call_host(lambda *arrays: seen.extend(np.array(array) for array in arrays), None, arguments)

    jax.jit(program)(ARGUMENTS[kind])
    jax.effects_barrier()
    for found, wanted in zip(seen, ARGUMENTS[kind], strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, np.shape(wanted))
        np.testing.assert_array_equal(found, wanted)


def test_results_come_back():
    shapes = {"sum": jax.ShapeDtypeStruct((), np.float32), "twice": jax.ShapeDtypeStruct((3,), np.float32)}
    found = jax.jit(lambda x: call_host(lambda x: {"sum": x.sum(), "twice": 2 * x}, shapes, [x]))(jnp.arange(3.0))
    assert (float(found["sum"]), found["twice"].tolist()) == (3, [0, 2, 4])


def test_ordered_calls_come_in_the_order_of_the_program():
    seen = []

    def program(x):
        for number in range(5):
            call_host(lambda x, number=number: seen.append((number, float(x))), None, [x + number], is_ordered=True)

    jax.jit(program)(jnp.float32(10))
    jax.effects_barrier()
    assert seen == [(number, 10.0 + number) for number in range(5)]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_programs_that_call_python_are_recognised(is_ordered):
    def calling(x):
        call_host(lambda x: None, None, [x], is_ordered=is_ordered)
        return x

    def printing(x):
        jax.debug.print("{}", x, ordered=is_ordered)
        return x

    assert jax.make_jaxpr(calling)(1.0).effects
    assert jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: calling(y), x))(1.0).effects
    assert jax.make_jaxpr(printing)(1.0).effects
    assert not jax.make_jaxpr(jnp.sin)(1.0).effects


@pytest.mark.parametrize("size", [1, SMALL_BYTES])
def test_derivatives_of_values_passed_to_python_are_refused(size):
    shape = jax.ShapeDtypeStruct((), np.float32)

    def of_call(x):
        return call_host(lambda x: x.sum(), shape, [x])

    x = jnp.ones(size)
    with pytest.raises(TypeError, match="a call of Python has no derivative"):
        jax.grad(of_call)(x)
    assert jax.jit(jax.grad(lambda x: of_call(jax.lax.stop_gradient(x)) * x.sum()))(x).tolist() == [size] * size
