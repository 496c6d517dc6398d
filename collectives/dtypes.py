"""Which dtypes collectives carry, and in which precision they are added."""

from __future__ import annotations

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)

FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64")) + (bfloat16,)
INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
REDUCIBLE = frozenset(FLOATS + INTEGERS)
MOVABLE = REDUCIBLE | {np.dtype(bool)}

_SUMMED_IN_FLOAT32 = frozenset({np.dtype("float16"), bfloat16})


def accumulator_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """The dtype in which contributions are added: float32 for the 16-bit floats, else `dtype` itself.

    Minimum and maximum need no wider accumulator, they only select.
    """
    if op in ("sum", "mean") and dtype in _SUMMED_IN_FLOAT32:
        return np.dtype(np.float32)
    return dtype
