"""Arithmetic of reductions in compiled programs: that of `collectives`, in the order of the replicas."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from adding import added

from collectives import UnsupportedBufferError
from collectives.arrays import INTEGERS
from collectives.reduction import Reduction
from strategies.jax.replicas.reduction_ops import base_of, check_dtype, operand, parse_op, reduce_in_order


@pytest.mark.parametrize("op", ["sum", "Add", "COLLECTIVE_OP_ADD", "LOGICAL_and"])
def test_names_can_have_any_case_and_the_prefix(op):
    if op == "sum":
        with pytest.raises(ValueError, match="'sum' is not a collective operation; use one of ADD, MEAN, MUL"):
            parse_op(op)
    else:
        assert parse_op(op) == op.upper().removeprefix("COLLECTIVE_OP_")


@pytest.mark.parametrize(
    ("name", "base", "made"),
    [
        ("ADD", "sum", [0, -2, 3]),
        ("SQUARE_ADD", "sum", [0, 4, 9]),
        ("LOGICAL_AND", "min", [0, 1, 1]),
        ("LOGICAL_OR", "max", [0, 1, 1]),
        ("LOCAL", "local", [0, -2, 3]),
    ],
)
def test_an_operation_is_made_of_operands_and_a_reduction(name, base, made):
    assert base_of(name) == base
    assert operand(name, jnp.array([0.0, -2, 3])).tolist() == made


def test_squares_of_16_bits_are_made_in_float32():
    assert operand("SQUARE_ADD", jnp.ones(1, jnp.bfloat16)).dtype == jnp.float32


def test_sums_are_added_in_the_order_of_the_tree(seed):
    values = np.random.default_rng(seed).standard_normal((5, 100)).astype(np.float32)
    wanted = added(values)
    found = jax.jit(lambda values: reduce_in_order("sum", list(values)))(values)
    np.testing.assert_array_equal(found, wanted)
    mean = jax.jit(lambda values: reduce_in_order("mean", list(values)))(values)
    np.testing.assert_array_equal(mean, wanted / np.float32(5))


@pytest.mark.parametrize(("op", "wanted"), [("min", -3), ("max", 5), ("prod", -30), ("sum", 4), ("mean", 1)])
def test_integers_stay_integers(op, wanted):
    found = reduce_in_order(op, [jnp.array([number], jnp.int32) for number in (2, 5, -3)])
    assert (found.dtype, found.tolist()) == (jnp.int32, [wanted])


def test_means_of_integers_are_right_even_if_their_sum_overflows():
    for dtype, numbers, mean in (
        (jnp.uint8, [250, 251, 252, 253], 251),
        (jnp.int8, [-128, -127, -126, -125], -126),
        (jnp.int32, [2**31 - 1, 2**31 - 3], 2**31 - 2),
        (jnp.uint32, [2**32 - 1] * 3, 2**32 - 1),
    ):
        found = reduce_in_order("mean", [jnp.array([number], dtype) for number in numbers])
        assert (found.dtype, found.tolist()) == (dtype, [mean])


def test_16_bits_are_combined_in_float32():
    small = [jnp.array([value], jnp.bfloat16) for value in (256.0, 1.0, 1.0)]  # bfloat16 has no 257
    assert float(reduce_in_order("sum", small)[0]) == 258.0
    assert reduce_in_order("sum", small).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [dtype.name for dtype in INTEGERS])
@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.complete) for count in (1, 2, 8))])
def test_integers_are_reduced_as_between_instances(dtype, count, seed):
    """Values cover the whole range: sums wrap around, but intermediate sums of means must not."""
    info = np.iinfo(dtype)
    values = np.random.default_rng(seed).integers(info.min, info.max, (count, 100), dtype, endpoint=True)
    values[:, :3] = info.max, info.min, info.max - 1
    values[0, 2] = 1
    ops = ("sum", "mean", "min", "max")
    with jax.enable_x64(info.bits == 64):
        together = jax.jit(lambda values: [reduce_in_order(op, list(values)) for op in ops])(values)
        mean = reduce_in_order("mean", list(jnp.asarray(values)))
    for op, found in (*zip(ops, together, strict=True), ("mean", mean)):
        wanted = np.empty(100, dtype)
        Reduction(op, wanted.dtype).reduce(list(values), wanted, count)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_dtypes_that_instances_cannot_exchange_are_refused():
    check_dtype(np.dtype(ml_dtypes.bfloat16), reduces=True)
    check_dtype(np.dtype(bool), reduces=False)
    with pytest.raises(UnsupportedBufferError, match="replicas cannot reduce bool; convert it to one of bfloat16, "):
        check_dtype(np.dtype(bool), reduces=True)
    with pytest.raises(UnsupportedBufferError, match="replicas cannot exchange complex64"):
        check_dtype(np.dtype(np.complex64), reduces=False)
