"""The supported dtypes, the dtypes in which they are added, and aligned memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)

FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64")) + (bfloat16,)
INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
REDUCIBLE = frozenset(FLOATS + INTEGERS)
MOVABLE = REDUCIBLE | {np.dtype(bool)}

_SUMMED_IN_FLOAT32 = frozenset({np.dtype("float16"), bfloat16})
_OF_MEANS = {
    np.dtype(f"{sign}int{bits}"): np.dtype(f"{sign}int{wide}")
    for sign in ("", "u")
    for bits, wide in ((8, 32), (16, 32), (32, 64))
}

ALIGNMENT_BYTES = 64


def accumulator_dtype(dtype: np.dtype, op: str) -> np.dtype:
    """Return the dtype in which contributions are added: float32 for 16-bit floats, otherwise `dtype` itself.

    Means of integers are an exception: their sum may not fit into `dtype`. So 8-bit and 16-bit integers are added in
    32 bits, enough for 65,536 contributions, and 32-bit integers in 64 bits. Minimum and maximum only select values.
    """
    if op in ("sum", "mean") and dtype in _SUMMED_IN_FLOAT32:
        return np.dtype(np.float32)
    return _OF_MEANS.get(dtype, dtype) if op == "mean" else dtype


def aligned_empty(nbytes: int) -> np.ndarray:
    """Allocate `nbytes` bytes of private memory, aligned to ALIGNMENT_BYTES."""
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return memory[start : start + nbytes]
