"""The dtypes that collectives carry, the precision in which they are added, and aligned memory."""

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
    """Return the dtype in which contributions are added: float32 for the 16-bit floats, else `dtype` itself.

    The sum behind a mean of integers need not fit into their dtype, though the mean does: it is taken in 32 bits for
    those of 8 and 16 bits, which is enough for 65,536 of them, and in 64 for those of 32. Minimum and maximum need no
    wider accumulator, they only select.
    """
    if op in ("sum", "mean") and dtype in _SUMMED_IN_FLOAT32:
        return np.dtype(np.float32)
    return _OF_MEANS.get(dtype, dtype) if op == "mean" else dtype


def aligned_empty(nbytes: int) -> np.ndarray:
    """Return `nbytes` bytes of private memory that begin at a multiple of ALIGNMENT_BYTES."""
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return memory[start : start + nbytes]
