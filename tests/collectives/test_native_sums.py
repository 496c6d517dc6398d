"""Sums of the native kernel have the bits of NumPy's."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import collectives.kernel
from collectives.kernel import Kernel
from collectives.reduction import order_of
from collectives.tree import combined

LENGTHS = (0, 1, 2, 3, 7, 8, 15, 17, 31, 33, 64, 100, 511, 513, 1023, 1025, 4099)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, -3e38, 1.0)  # denormals of float32 among them
DTYPES = (np.float32, np.float64)
COUNTS = (0, 1, 2, 3, 4, 6, 7, 8, 1024)


def arrays_of(dtype: type, number: int, length: int, start: int) -> list[np.ndarray]:
    """Return arrays whose memory begins `start` elements after that of an allocation."""
    random = np.random.default_rng([number, length])
    arrays = []
    for _ in range(number):
        values = random.standard_normal(start + length) * 10.0 ** random.integers(-44, 38, start + length)
        special = random.random(start + length) < 0.2
        values[special] = random.choice(SPECIAL, np.count_nonzero(special))
        with np.errstate(all="ignore"):
            arrays.append(values.astype(dtype)[start:])
    return arrays


def mean_by_numpy(arrays: list[np.ndarray], count: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        total: np.ndarray = np.array(combined(arrays, np.add))
        return total / arrays[0].dtype.type(count) if count else total


def bits(array: np.ndarray) -> bytes:
    """Return the bits, with all NaNs alike: where two of them meet, even NumPy's choice depends on the length."""
    return np.where(np.isnan(array), array.dtype.type(np.nan), array).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(1, 10))
def test_sums_and_means_have_the_bits_of_numpy(native: Kernel, dtype: type, number: int) -> None:
    for length, start, count in product(LENGTHS, (0, 1, 3), COUNTS):
        arrays = arrays_of(dtype, number, length, start)
        out = np.full(start + length, 7, dtype)[start:]
        assert native.combine(order_of(number).steps, arrays, out, count)
        assert bits(out) == bits(mean_by_numpy(arrays, count)), (length, start, count)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_sum_may_replace_any_of_its_sources(native: Kernel, number: int) -> None:
    for replaced, length in product(range(number), LENGTHS):
        arrays = arrays_of(np.float32, number, length, 1)
        expected = mean_by_numpy(arrays, number)
        assert native.combine(order_of(number).steps, arrays, arrays[replaced], number)
        assert bits(arrays[replaced]) == bits(expected)


def test_other_arrays_are_left_to_numpy(native: Kernel) -> None:
    steps = order_of(2).steps
    one, wide = np.ones(8, np.float32), np.ones(16, np.float32)
    read_only = np.ones(8, np.float32)
    read_only.flags.writeable = False
    odd = np.zeros(33, np.uint8)[1:].view(np.float32)
    refused = [
        ([one, one.astype(np.float64)], one),
        ([one, one.astype(np.float16)], one),
        ([one.astype(">f4"), one.astype(">f4")], one.astype(">f4")),
        ([one.astype(np.int32)] * 2, one.astype(np.int32)),
        ([one, wide[::2]], one),
        ([one, wide], one),
        ([one], one),
        ([one, one], read_only),
        ([wide[0:8], one], wide[1:9]),
        ([np.ma.masked_array(one), one], one),
        ([one, odd], one),
    ]
    before = wide.copy()
    for sources, out in refused:
        assert not native.combine(steps, sources, out, 0)
    np.testing.assert_array_equal(wide, before)


def test_steps_that_are_no_order_are_refused(native: Kernel) -> None:
    one = np.ones(8, np.float32)
    for steps in ([[0, 2, 0]], [[-1, 0, 0]], [[0, 1, 99]], [[0, 1]]):
        assert not native.combine(np.array(steps, np.int32).tobytes(), [one, one], one, 0)


def test_the_kernel_is_not_compiled_with_fast_arithmetic() -> None:
    """`CFLAGS` of whoever installs the project may ask for it; without the kernel, NumPy does the work."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = Path(collectives.kernel.__file__).with_name("native") / "kernel.c"
    command = [compiler, "-std=c11", "-ffast-math", "-DKERNEL_ALONE", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "the bits of sums must be NumPy's" in done.stderr
