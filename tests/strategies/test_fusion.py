"""Buffers that travel together in one collective."""

import ml_dtypes
import numpy as np
import pytest

from strategies.exchange.flat import fusion_groups

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("megabytes", "dtypes", "groups"),
    [
        ([40], [FLOAT32], [[0]]),
        ([1, 2, 3], [FLOAT32] * 3, [[0, 1, 2]]),
        ([1, 1, 1, 1], [FLOAT32, BFLOAT16] * 2, [[0, 2], [1, 3]]),
        ([3, 0, 1], [FLOAT32] * 3, [[0, 2]]),
        ([], [], []),
        ([20, 20, 8, 40, 1], [FLOAT32] * 5, [[0], [1, 2], [3], [4]]),
    ],
)
def test_small_buffers_of_one_dtype_travel_together(megabytes, dtypes, groups):
    assert fusion_groups([each << 20 for each in megabytes], dtypes, 32 << 20) == groups
