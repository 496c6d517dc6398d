"""The arithmetic of a reduction, number by number: order, precision and the division of a mean."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from adding import added

from collectives.reduction import BLOCK_BYTES, Reduction

pytestmark = pytest.mark.usefixtures("with_either")

ODD = BLOCK_BYTES // 4 + 3  # elements of float32: one block and a little more


def reduced(op: str, contributions: list[np.ndarray]) -> np.ndarray:
    out = np.empty_like(contributions[0])
    Reduction(op, out.dtype).reduce(contributions, out, len(contributions))
    return out


@pytest.mark.parametrize("length", [1, 7, ODD])
def test_contributions_are_added_in_the_order_of_the_tree(length: int) -> None:
    """The sum of all is 4 with the two middle numbers swapped, or if they are added one after another."""
    numbers = [1.0, 2.0**24, 3.0, -(2.0**24)]
    contributions = [np.full(length, number, np.float32) for number in numbers]
    assert set(reduced("sum", contributions)) == {3.0}
    first, second, third, fourth = contributions
    assert set(reduced("sum", [first, third, second, fourth])) == {4.0}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_are_rounded_once(dtype: type) -> None:
    """The terms are 1 and seven quarters of eps; additions in pairs in 16 bits would lose three of them."""
    quarter = float(ml_dtypes.finfo(dtype).eps) / 4
    contributions = [np.full(5, value, dtype) for value in (1.0, *[quarter] * 7)]
    assert set(reduced("sum", contributions).astype(float)) == {1 + 8 * quarter}
    assert set(reduced("mean", contributions).astype(float)) == {(1 + 8 * quarter) / 8}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_a_mean_is_divided_once_by_the_count(count: int) -> None:
    rng = np.random.default_rng(count)
    contributions = [rng.standard_normal(100, np.float32) for _ in range(count)]
    total = added(contributions)
    assert reduced("mean", contributions).tobytes() == (total / np.float32(count)).tobytes()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_a_mean_of_integers_is_truncated_towards_zero(dtype: type) -> None:
    contributions = [np.array([-5, 5, -6, 0], dtype), np.array([0, 0, 0, 1], dtype)]
    assert reduced("mean", contributions).tolist() == [-2, 2, -3, 0]
