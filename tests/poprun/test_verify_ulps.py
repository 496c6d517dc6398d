"""Distances between arrays in units in the last place."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from poprun.verify.comparison import Distance, distance

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def between(one, other, dtype) -> Distance | None:
    arrays = [np.asarray(value, dtype) for value in (one, other)]
    return distance(arrays[0].dtype.name, *(array.tobytes() for array in arrays))


@pytest.mark.parametrize("dtype", FLOATS)
class TestFloats:
    def test_neighbours_are_one_unit_apart(self, dtype):
        for number in (1.0, -1.0, 0.0):
            value = np.asarray([number, 3.0], dtype)
            following = value.copy()
            following[0] = np.nextafter(value[0], dtype(10)) if dtype is not ml_dtypes.bfloat16 else value[0]
            if dtype is ml_dtypes.bfloat16:
                following.view(np.int16)[0] += 1
            assert between(value, following, dtype) == Distance(1, 2, 1)

    def test_units_are_counted_across_zero(self, dtype):
        smallest = np.zeros(1, dtype)
        smallest.view({2: np.int16, 4: np.int32, 8: np.int64}[smallest.itemsize])[0] = 2
        assert between(smallest, -smallest, dtype) == Distance(1, 1, 4)

    def test_the_two_zeros_differ_by_no_unit(self, dtype):
        assert between([0.0, 1.0], [-0.0, 1.0], dtype) == Distance(1, 2, 0)

    def test_nan_has_no_distance_from_numbers(self, dtype):
        assert between([np.nan, 1.0], [1.0, 1.0], dtype) == Distance(1, 2, None)

    def test_infinity_is_one_unit_above_the_largest_number(self, dtype):
        largest = ml_dtypes.finfo(dtype).max
        assert between([np.inf], [largest], dtype) == Distance(1, 1, 1)

    def test_equal_arrays_have_no_difference(self, dtype):
        assert between(np.arange(100), np.arange(100), dtype) == Distance(0, 100, 0)


def test_the_largest_distance_is_found_anywhere(seed):
    generator = np.random.default_rng(seed)
    one = generator.normal(size=5001).astype(np.float32)
    other = one.copy()
    changed = generator.choice(5001, 77, replace=False)
    units = generator.integers(1, 1000, 77)
    other.view(np.int32)[changed] += units.astype(np.int32)
    assert between(one, other, np.float32) == Distance(77, 5001, int(units.max()))


def test_complex_numbers_differ_in_either_part():
    assert between([1 + 1j, 2 + 2j, 3], [1 + 1j, 2.5 + 2.5j, 3], np.complex64) == Distance(1, 3, 1 << 21)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint16, np.int64, bool, ml_dtypes.float8_e4m3fn])
def test_elements_of_other_types_are_only_counted(dtype):
    assert between([1, 0, 1], [1, 1, 0], dtype) == Distance(2, 3, None)


def test_arrays_of_different_sizes_have_no_distance():
    assert between([1.0], [1.0, 2.0], np.float32) is None
