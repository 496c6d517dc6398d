"""The checks of buffers for collectives, and the description of a call by its buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.arrays import MOVABLE, REDUCIBLE
from collectives.calls import Call
from collectives.errors import UnsupportedBufferError
from collectives.reduction import REDUCING, Reduction, normalise_op

_EVERYTHING = slice(None)


def new_call(
    operation: str, name: str, op: str, buffer: np.ndarray | None, root: int, into_shared: bool
) -> tuple[Call, Reduction]:
    """Describe a call and the reduction that it needs.

    Raises:
        UnsupportedBufferError: The collective does not support the buffer's dtype.
        ValueError: `op` is unknown.
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
    """Return a one-dimensional view of the array's memory, as a plain `np.ndarray`."""
    is_plain = type(array) is np.ndarray
    if not is_plain:
        if not isinstance(array, (np.ndarray, np.generic)):
            raise UnsupportedBufferError(
                f"collectives take NumPy arrays, not {type(array).__name__}; convert it with np.asarray"
            )
        refuse_masked(array)
    flags = array.flags
    if not flags.c_contiguous or (writable and not flags.writeable):
        need = "writable and C-contiguous" if writable else "C-contiguous"
        raise UnsupportedBufferError(
            f"a {array.dtype} array of shape {list(array.shape)} is not {need}; copy it first (np.array(x, order='C'))"
        )
    if not is_plain:
        array = np.asarray(array)
    return array if array.ndim == 1 else array.reshape(-1)


def refuse_masked(value: object) -> None:
    """Refuse masked arrays, because their mask would be lost.

    Raises:
        UnsupportedBufferError: `value` is a masked array.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedBufferError(
            f"a {value.dtype} array of shape {list(value.shape)} is masked, and its mask would be lost; fill it "
            "(array.filled(0)), and send the mask separately (np.ma.getmaskarray(array))"
        )


def result_array(out: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return `out` if it has the result's shape and dtype; if `out` is None, a new array."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != dtype:
        raise UnsupportedBufferError(
            f"out is {describe(out)}, but the result is {dtype}{list(shape)}; give an array of that shape and dtype"
        )
    return out


def flat_contributions(contributions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return one-dimensional views of one rank's contributions.

    Raises:
        UnsupportedBufferError: A contribution is not a contiguous array, or they differ in shape or dtype.
    """
    first = contributions[0]
    if len(contributions) == 1:
        return [flat_view(first)]
    views = [flat_view(array) for array in contributions]
    for array in contributions:
        if array.dtype != first.dtype or array.shape != first.shape:
            raise UnsupportedBufferError(
                f"contributions differ: {describe(first)} and {describe(array)}; "
                "give arrays of one shape and dtype for all replicas"
            )
    return views


def refuse_partial_overlap(wholes: Sequence[np.ndarray], part: np.ndarray, own: slice = _EVERYTHING) -> None:
    """Refuse overlapping input and output memory, unless each element is read and written in the same place.

    Args:
        wholes: One-dimensional contiguous arrays. They are read and `part` is written, or the reverse.
        part: One-dimensional contiguous array that corresponds to `whole[own]`.
        own: Block of this rank.

    Raises:
        UnsupportedBufferError: The arrays overlap in another way, so some elements would be overwritten before they
            are read.
    """
    for whole in wholes:
        if whole is not part and np.may_share_memory(whole, part) and not _is_same_memory(whole[own], part):
            raise UnsupportedBufferError(
                f"the result and its input, {describe(part)} and {describe(whole)}, overlap partly; give the "
                "result its own memory, or exactly the memory of the input that it replaces"
            )


def _is_same_memory(one: np.ndarray, other: np.ndarray) -> bool:
    return one.nbytes == other.nbytes and _address(one) == _address(other)


def _address(array: np.ndarray) -> int:
    start: int = array.__array_interface__["data"][0]
    return start


def refuse_overlaps_in_group(tensors: Sequence[tuple[str, Sequence[np.ndarray], np.ndarray]]) -> None:
    """Refuse a group if the result of one tensor shares memory with another tensor.

    Args:
        tensors: Name, contributions and result of each tensor, as one-dimensional contiguous arrays. A result may have
            the memory of a contribution of its own tensor.

    Raises:
        UnsupportedBufferError: Two tensors share memory; the message names them.
    """
    ranges = []
    for name, sources, out in tensors:
        start = _address(out)
        ranges.append((start, start + out.nbytes, name, True))
        others = [(_address(source), source.nbytes) for source in sources]
        ranges += [(place, place + nbytes, name, False) for place, nbytes in others if place != start]
    end_of_all = end_of_results = (0, "")  # the furthest end, and its tensor, of the ranges that begin earlier
    for start, end, name, is_result in sorted(each for each in ranges if each[0] < each[1]):
        before = end_of_all if is_result else end_of_results
        if start < before[0]:
            raise UnsupportedBufferError(
                f"tensors {before[1]!r} and {name!r} of a group share memory that receives a result; give each its own"
            )
        end_of_all = max(end_of_all, (end, name))
        if is_result:
            end_of_results = max(end_of_results, (end, name))


def describe(value: object) -> str:
    """Format a buffer for messages: `float32[3, 4]`, or its type if it is not an array."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
