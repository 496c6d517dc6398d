"""The arithmetic of the ordered reduction: contributions are combined one after another, in the given order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from collectives.dtypes import accumulator_dtype

OPERATIONS = ("sum", "mean", "min", "max")
REDUCING = (
    "all_reduce",
    "ordered_all_reduce",
    "reduce_scatter",
    "ordered_reduce_scatter",
)  # the collectives that combine contributions
_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}

BLOCK_BYTES = 1 << 18  # several passes over a block stay in a core's cache


_of_thread = threading.local()


def _quietly(function: Callable[..., None], *arguments: Any) -> None:
    """Call it with NumPy's floating-point warnings off: infinity and NaN are results, and no reason to stop half-way.

    A context of its own for each thread does what `np.errstate` does in a tenth of the time.
    """
    try:
        context: Context = _of_thread.context
    except AttributeError:
        context = _of_thread.context = Context()
        context.run(np.seterr, all="ignore")
    context.run(function, *arguments)


def normalise_op(op: str) -> str:
    """The reduction's name in lower case; `op` may be any of OPERATIONS in any case.

    Raises:
        ValueError: for any other name.
    """
    lower = str(op).lower()
    if lower not in OPERATIONS:
        raise ValueError(f"Unsupported reduce op: {op!r}; use one of {', '.join(OPERATIONS)}")
    return lower


@dataclass(frozen=True, eq=False)  # hashed on the hot path, so by identity
class Reduction:
    """One reduction of arrays of one dtype: `((c0 + c1) + c2) + ...`, for a mean divided once by the count.

    16-bit floats are added in float32 and rounded once. Sums of integers wrap around, as NumPy's do. A mean of integers
    is truncated towards zero, as in C, and is right also where their sum does not fit into their dtype.
    """

    op: str
    dtype: np.dtype

    @cached_property
    def accumulator(self) -> np.dtype:
        """The dtype of partial results."""
        return accumulator_dtype(self.dtype, self.op)

    @cached_property
    def is_direct(self) -> bool:
        """Whether partial results may be kept in an array of the result's dtype."""
        return self.accumulator == self.dtype and not self.divides_first

    @cached_property
    def divides_first(self) -> bool:
        """Whether no dtype holds the sum, so that quotients and remainders are added: the mean of 64-bit integers.

        Those who see one contribution after another reduce `shares` to sums, and `join` them.
        """
        return self.op == "mean" and self.dtype.kind in "iu" and self.dtype.itemsize == 8

    def first_dtype(self, count: int) -> np.dtype:
        """The dtype in which rank 0 hands on what its `count` contributions come to: a single one as it is."""
        return self.dtype if count == 1 else self.accumulator

    @cached_property
    def _block(self) -> int:
        return BLOCK_BYTES // self.accumulator.itemsize

    @cached_property
    def ufunc(self) -> np.ufunc:
        """The NumPy function that combines two contributions."""
        return _UFUNCS[self.op]

    def fold(self, sources: Sequence[np.ndarray], into: np.ndarray) -> None:
        """Combine `sources` in order into the partial result `into` (accumulator dtype, same shape, 1-D).

        `into` may be one of the first two sources.
        """
        _quietly(self._fold, sources, into)

    def _fold(self, sources: Sequence[np.ndarray], into: np.ndarray) -> None:
        if len(sources) == 1:
            if sources[0] is not into:
                np.copyto(into, sources[0])
            return
        block = max(1, BLOCK_BYTES // into.itemsize)
        if into.size <= block:
            self._fold_block(sources, into)
            return
        for start in range(0, into.size, block):
            window = slice(start, start + block)
            self._fold_block([source[window] for source in sources], into[window])

    def reduce(self, sources: Sequence[np.ndarray], out: np.ndarray, count: int) -> None:
        """Combine `sources` in order and finish the result into `out` (the reduction's dtype, 1-D).

        Args:
            sources: 1-D arrays of `out`'s size; the first may be a partial result (accumulator dtype).
            out: may be one of the sources.
            count: the number of replicas, for the mean.
        """
        _quietly(self._reduce, sources, out, count)

    def _reduce(self, sources: Sequence[np.ndarray], out: np.ndarray, count: int) -> None:
        block = self._block
        if out.size <= block:
            if len(sources) == 2 and self.is_direct:  # what two ranks do with small gradients, again and again
                self.ufunc(sources[0], sources[1], out=out)
                if self.op == "mean":
                    _divide(out, out, count)
            else:
                self._reduce_block(sources, out, count)
            return
        for start in range(0, out.size, block):
            window = slice(start, start + block)
            self._reduce_block([source[window] for source in sources], out[window], count)

    def finish(self, total: np.ndarray, out: np.ndarray, count: int) -> None:
        """Turn the complete partial result `total`, which is used up, into the result `out`; they may be the same."""
        _quietly(self._finish, total, out, count)

    def _finish(self, total: np.ndarray, out: np.ndarray, count: int) -> None:
        if self.op == "mean":
            _divide(total, out, count)
        elif total is not out:
            out[...] = total

    def _reduce_block(self, sources: Sequence[np.ndarray], out: np.ndarray, count: int) -> None:
        if self.divides_first:
            quotients, remainders = (np.add.reduce(parts) for parts in shares(sources, count))
            join(quotients, remainders, out, count)
            return
        direct = self.is_direct and not any(np.may_share_memory(out, source) for source in sources[2:])
        total = out if direct else np.empty(out.size, self.accumulator)
        self._fold(sources, total)
        self._finish(total, out, count)

    def _fold_block(self, sources: Sequence[np.ndarray], into: np.ndarray) -> None:
        combine = self.ufunc
        first, second = sources[0], sources[1]
        if first.dtype == second.dtype == into.dtype:
            combine(first, second, out=into)
        else:
            into[...] = first
            combine(into, second, out=into)
        for source in sources[2:]:
            combine(into, source, out=into)


def _divide(total: np.ndarray, out: np.ndarray, count: int) -> None:
    if total.dtype.kind not in "iu":
        if count == 1:
            quotient = total
        elif count & (count - 1) == 0:  # the same bits as a division, several times faster
            quotient = np.multiply(total, total.dtype.type(1 / count), out=total)
        else:
            quotient = np.divide(total, total.dtype.type(count), out=total)
        if quotient is not out:
            out[...] = quotient
        return
    if total.itemsize < 4:  # the count need not fit
        total = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
    join(0, total, out, count)


def shares(sources: Sequence[np.ndarray], count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The quotients, rounded down, and the remainders of integers divided by `count`.

    Args:
        sources: of one dtype, that of the result.
        count: the number of contributions; neither the sum of so many quotients nor that of the remainders leaves the
            range of 64 bits, but for what wraps back when they are joined.
    """
    divisor = sources[0].dtype.type(count)
    quotients, remainders = zip(*(np.divmod(source, divisor) for source in sources), strict=True)
    return list(quotients), list(remainders)


def join(quotients: np.ndarray | int, remainders: np.ndarray, out: np.ndarray, count: int) -> None:
    """The mean, truncated towards zero, from the sums of `shares`.

    Args:
        quotients: their sum.
        remainders: their sum.
        out: receives the mean.
        count: the number of contributions.
    """
    carried, left = np.divmod(remainders, remainders.dtype.type(count))
    rounded_down = quotients + carried
    if rounded_down.dtype.kind == "i":
        rounded_down += (rounded_down < 0) & (left != 0)
    out[...] = rounded_down
