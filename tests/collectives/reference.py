"""Contributions of replicas, and their reduction by NumPy in the order of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import accumulate

import ml_dtypes
import numpy as np

from collectives import Communicator

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REDUCIBLE = FLOATS + INTEGERS
MOVABLE = (*REDUCIBLE, "bool")
OPERATIONS = ("sum", "mean", "min", "max")
SMALL_LENGTHS = (0, 1, 7)
LARGE = 2**19 + 3
PERIOD = 65_537
SPREADS = ("one each", "two each", "three each", "one or two")

_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def replicas_of_ranks(spread: str, size: int) -> list[range]:
    """Return the global replicas of every rank."""
    counts = {
        "one each": [1] * size,
        "two each": [2] * size,
        "three each": [3] * size,
        "five each": [5] * size,  # too many for 16-bit floats to travel in slices
        "one or two": [1 + rank % 2 for rank in range(size)],
    }[spread]
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


@lru_cache(maxsize=256)
def _drawn(dtype: str, length: int, replica: int) -> np.ndarray:
    """Return random values; floats differ so much in size that the order of their sum matters."""
    random = np.random.default_rng([replica, length])
    if dtype in FLOATS:
        values = random.standard_normal(length) * np.exp2(random.integers(-6, 7, length))
    elif dtype == "bool":
        values = random.integers(0, 2, length)
    else:
        info = np.iinfo(dtype)
        values = random.integers(info.min, info.max, length, dtype, endpoint=True)
    return values.astype(dtype_of(dtype))


@lru_cache(maxsize=64)
def contribution(dtype: str, length: int, replica: int) -> np.ndarray:
    """Return the contribution of a replica, read-only.

    Long arrays repeat themselves after a prime number of elements, so that no two chunks of them are alike.
    """
    array = np.resize(_drawn(dtype, min(length, PERIOD), replica), length)
    array.flags.writeable = False
    return array


def contributions(dtype: str, length: int, replicas: Sequence[int]) -> list[np.ndarray]:
    return [contribution(dtype, length, replica) for replica in replicas]


def reduced(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduce in the order of the tree: split at the largest power of two below the number of arrays.

    Plain NumPy adds: 16-bit floats in float32, rounded once; means are divided once.
    """
    dtype = arrays[0].dtype
    if op == "mean" and dtype.kind in "iu":
        return _mean_of_integers(arrays)
    is_sum = op in ("sum", "mean")
    wide = np.dtype(np.float32) if is_sum and dtype in (np.float16, ml_dtypes.bfloat16) else dtype
    total = _combined([array.astype(wide) for array in arrays], _UFUNCS[op])
    if op == "mean":
        total = total / total.dtype.type(len(arrays))
    return total.astype(dtype)


def _combined(arrays: Sequence[np.ndarray], combine: np.ufunc) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    middle = max(2**power for power in range(32) if 2**power < len(arrays))
    return combine(_combined(arrays[:middle], combine), _combined(arrays[middle:], combine))


def chained(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return ((a0 + a1) + a2) + ..., for comparison."""
    return reduce(np.add, arrays)


def _mean_of_integers(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean in integers that hold every sum, Python's own for 64 bits; truncated towards zero."""
    wide = np.int64 if arrays[0].dtype.itemsize < 8 else object
    total = sum(array.astype(wide) for array in arrays)
    truncated = np.abs(total) // len(arrays)
    return np.where(total < 0, -truncated, truncated).astype(arrays[0].dtype)


@dataclass(frozen=True, eq=False)
class Reduced:
    """The reduction of all contributions.

    Attributes:
        arrays: The contributions of all replicas in order.
        op: One of OPERATIONS.
        length: The length of the result if contributions repeat themselves, when `arrays` hold one period; else None.
    """

    arrays: Sequence[np.ndarray]
    op: str
    length: int | None = None

    @cached_property
    def _once(self) -> np.ndarray:
        return reduced(self.arrays, self.op)

    def _repeated(self, array: np.ndarray) -> np.ndarray:
        return array if self.length is None else np.resize(array, self.length)

    @property
    def bits(self) -> np.ndarray:
        """Return the result of the reduction in the order of the tree."""
        return self._repeated(self._once)

    @property
    def has_an_order(self) -> bool:
        """Whether another order of the same contributions may have another result."""
        return self.op in ("sum", "mean") and self._once.dtype.kind not in "iu" and len(self.arrays) > 2

    @property
    def rounding(self) -> np.ndarray:
        """Return the largest distance between the results of two orders, in float64.

        The sum of n floats is wrong by at most (n - 1) u (|c0| + |c1| + ...) to first order in u, half the distance
        between 1 and the next float of the accumulator, whatever the order (Higham, Accuracy and Stability of
        Numerical Algorithms, 4.2). Two sums may be wrong in opposite directions, so n stands for n - 1 and u twice;
        then each of them is rounded once more, to the result's dtype.
        """
        count, dtype = len(self.arrays), self._once.dtype
        finfo = ml_dtypes.finfo(dtype)
        unit = float(ml_dtypes.finfo(np.float64 if dtype == np.float64 else np.float32).eps)
        of_sum = count * unit * sum(np.abs(array.astype(np.float64)) for array in self.arrays)
        of_result = float(finfo.eps) * np.abs(self._once.astype(np.float64)) + float(finfo.smallest_subnormal)
        return self._repeated(of_sum / (count if self.op == "mean" else 1) + of_result)


@lru_cache(maxsize=256)
def reduced_contributions(dtype: str, length: int, count: int, op: str) -> Reduced:
    """Return the reduction of the contributions of replicas 0 to `count` - 1."""
    return Reduced(contributions(dtype, min(length, PERIOD), range(count)), op, length)


def mine(communicator: Communicator, dtype: str, length: int, spread: str) -> tuple[list[np.ndarray], int]:
    """Return the contributions of this rank, and their number on all ranks together."""
    of_ranks = replicas_of_ranks(spread, communicator.size)
    return contributions(dtype, length, of_ranks[communicator.rank]), of_ranks[-1].stop
