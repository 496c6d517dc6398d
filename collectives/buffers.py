"""What buffers a collective takes, and how they describe a call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.calls import Call
from collectives.dtypes import MOVABLE, REDUCIBLE
from collectives.errors import UnsupportedBufferError
from collectives.reduction import REDUCING, Reduction, normalise_op


def new_call(
    operation: str, name: str, op: str, buffer: np.ndarray | None, root: int, into_shared: bool
) -> tuple[Call, Reduction]:
    """Describe a call, and the arithmetic behind it.

    Raises:
        UnsupportedBufferError: if the collective does not take the buffer's dtype.
        ValueError: for an unknown `op`.
    """
    if buffer is None:
        return Call(operation, name), Reduction("sum", np.dtype(np.float32))
    dtype = buffer.dtype
    reduces = operation in REDUCING
    op = normalise_op(op) if reduces else ""
    if dtype not in (REDUCIBLE if reduces else MOVABLE):
        raise UnsupportedBufferError(
            f"{operation} of {dtype}: supported are float16, bfloat16, float32, float64 and the integers"
            + ("" if reduces else ", and bool")
        )
    return Call(operation, name, op, dtype.name, buffer.shape, root, into_shared), Reduction(op, dtype)


def flat_view(array: np.ndarray, *, writable: bool = False) -> np.ndarray:
    """The array as one dimension, the same memory."""
    try:
        flags = array.flags
    except AttributeError:
        raise UnsupportedBufferError(
            f"collectives take NumPy arrays, not {type(array).__name__}; convert it with np.asarray"
        ) from None
    if not flags.c_contiguous or (writable and not flags.writeable):
        need = "writable and C-contiguous" if writable else "C-contiguous"
        raise UnsupportedBufferError(
            f"a {array.dtype} array of shape {list(array.shape)} is not {need}; copy it first (np.array(x, order='C'))"
        )
    return array if array.ndim == 1 else array.reshape(-1)


def result_array(out: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`out` if it has the result's shape and dtype, or a new array like that."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != dtype:
        raise UnsupportedBufferError(
            f"out is {describe(out)}, the result is {dtype}{list(shape)}; give an array like that"
        )
    return out


def flat_contributions(contributions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The contributions of one rank, each as one dimension.

    Raises:
        UnsupportedBufferError: if one is not a contiguous array, or they differ in shape or dtype.
    """
    first = contributions[0]
    if len(contributions) == 1:
        return [flat_view(first)]
    views = [flat_view(array) for array in contributions]
    for array in contributions:
        if array.dtype != first.dtype or array.shape != first.shape:
            raise UnsupportedBufferError(
                f"contributions differ: {describe(first)} and {describe(array)}; "
                "all replicas contribute arrays of one shape and dtype"
            )
    return views


def describe(value: object) -> str:
    """A buffer in messages: `float32[3, 4]`, or the type of what is no array."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
