"""The arithmetic of the ordered reduction: contributions are combined in the order of a tree, block by block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from collectives.arrays import accumulator_dtype
from collectives.tree import TreeNode, TreeSum, registers, steps

OPERATIONS = ("sum", "mean", "min", "max")
REDUCING = (
    "all_reduce",
    "ordered_all_reduce",
    "reduce_scatter",
    "ordered_reduce_scatter",
)  # the collectives that combine contributions
_UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}

BLOCK_BYTES = 1 << 18  # several passes over a block stay in a core's cache
_SMALL_BYTES = 1 << 16  # larger memory is fetched from the system again and again

_of_thread = threading.local()


def _quietly(function: Callable[..., None], *arguments: object) -> None:
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
    """Return the reduction's name in lower case; `op` may be any of OPERATIONS in any case.

    Raises:
        ValueError: for any other name.
    """
    lower = str(op).lower()
    if lower not in OPERATIONS:
        raise ValueError(f"Unsupported reduce op: {op!r}; use one of {', '.join(OPERATIONS)}")
    return lower


@dataclass(frozen=True, eq=False)  # hashed on the hot path, so by identity
class Reduction:
    """One reduction of arrays of one dtype, in the order of the tree (`collectives.tree`); a mean is divided once.

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

    def dtype_of(self, node: TreeNode) -> np.dtype:
        """Return the dtype in which a node travels: the contribution of one replica as it is."""
        return self.dtype if node.is_leaf else self.accumulator

    @cached_property
    def ufunc(self) -> np.ufunc:
        """The NumPy function that combines two contributions."""
        return _UFUNCS[self.op]

    def fold(self, sources: Sequence[np.ndarray], into: np.ndarray, nodes: tuple[TreeNode, ...] | Order = ()) -> None:
        """Combine `sources` into the partial result `into` (accumulator dtype, same shape, 1-D).

        Args:
            sources: neighbours in the tree.
            into: may be one of the sources.
            nodes: what they are, in the same order, or what `order_of` says of that; default: the contributions of
                replicas from 0 on.
        """
        _quietly(self._by_blocks, self._fold, sources, into, nodes, len(sources))

    def reduce(
        self, sources: Sequence[np.ndarray], out: np.ndarray, count: int, nodes: tuple[TreeNode, ...] | Order = ()
    ) -> None:
        """Combine `sources` and finish the result into `out` (the reduction's dtype, 1-D).

        Args:
            sources: 1-D arrays of `out`'s size, which are all of the tree; partial results have the accumulator dtype.
            out: may be one of the sources.
            count: the number of replicas, for the mean.
            nodes: as for `fold`.
        """
        _quietly(self._by_blocks, self._reduce, sources, out, nodes, count)

    def _by_blocks(
        self,
        combine: Callable[[Sequence[np.ndarray], np.ndarray, Order, int], None],
        sources: Sequence[np.ndarray],
        out: np.ndarray,
        nodes: tuple[TreeNode, ...] | Order,
        count: int,
    ) -> None:
        order = nodes if isinstance(nodes, Order) else order_of(nodes or len(sources))
        block = BLOCK_BYTES // self.accumulator.itemsize
        if out.size <= block:
            combine(sources, out, order, count)
            return
        for start in range(0, out.size, block):
            window = slice(start, start + block)
            combine([source[window] for source in sources], out[window], order, count)

    def _fold(self, sources: Sequence[np.ndarray], into: np.ndarray, order: Order, count: int) -> None:
        if order.rows:
            self._add(sources, into, order)
        elif sources[0] is not into:
            np.copyto(into, sources[0])

    def _reduce(self, sources: Sequence[np.ndarray], out: np.ndarray, order: Order, count: int) -> None:
        if self.is_direct:
            if len(sources) == 2:  # what two ranks do with small gradients, again and again
                self.ufunc(sources[0], sources[1], out=out)
            else:
                self._fold(sources, out, order, count)
            if self.op == "mean":
                _divide(out, out, count)
        elif self.divides_first:
            quotients, remainders = (np.add.reduce(parts) for parts in shares(sources, count))
            join(quotients, remainders, out, count)
        else:
            total = _rows(self.accumulator, 1, out.size, 0)[0]
            self._fold(sources, total, order, count)
            self._finish(total, out, count)

    def _add(self, sources: Sequence[np.ndarray], total: np.ndarray, order: Order) -> None:
        """Add short arrays. Sums of some of them lie in accumulators; the lowest of these is `total`, if it may be."""
        values = list(sources)
        combine = self.ufunc if self.accumulator == self.dtype else self._combine_widened
        is_apart = True
        for late in order.late:
            if np.may_share_memory(total, sources[late]):
                is_apart = False
        lowest = [total] if is_apart else []
        accumulators = [*lowest, *_rows(total.dtype, order.rows - is_apart, total.size, 1)]
        for left, right, register in order.before_last:
            into = accumulators[register]
            combine(values[left], values[right], out=into)
            values.append(into)
        combine(values[order.left], values[order.right], out=total)

    def _combine_widened(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        if left.dtype != out.dtype and right.dtype != out.dtype:  # NumPy would add in their dtype
            out[...] = left
            left = out
        self.ufunc(left, right, out=out)

    def finish(self, total: np.ndarray, out: np.ndarray, count: int) -> None:
        """Turn the complete partial result `total`, which is used up, into the result `out`; they may be the same."""
        _quietly(self._finish, total, out, count)

    def _finish(self, total: np.ndarray, out: np.ndarray, count: int) -> None:
        if self.op == "mean":
            _divide(total, out, count)
        elif total is not out:
            out[...] = total


class Order:
    """The additions of some sources, and what they need.

    Args:
        steps: see `collectives.tree.steps`.

    Attributes:
        before_last: all steps but the last one.
        left: what the last one adds.
        right: and to what it does.
        rows: how many accumulators they take.
        late: the sources that are added when the lowest accumulator has been written.
    """

    __slots__ = ("before_last", "late", "left", "right", "rows")

    def __init__(self, steps: tuple[TreeSum, ...]) -> None:
        self.before_last = steps[:-1]
        self.left, self.right, _ = steps[-1] if steps else (0, 0, 0)
        self.rows = registers(steps)
        count, begun = len(steps) + 1, [step.register for step in steps].index(0) + 1 if steps else 0
        self.late = [number for step in steps[begun:] for number in step[:2] if number < count]


@lru_cache(1024)
def order_of(nodes: tuple[TreeNode, ...] | int) -> Order:
    """Return the order in which nodes, or the contributions of so many replicas, are added."""
    if isinstance(nodes, int):
        nodes = tuple(TreeNode(replica, replica + 1) for replica in range(nodes))
    return Order(steps(nodes))


def _rows(dtype: np.dtype, rows: int, size: int, number: int) -> Sequence[np.ndarray]:
    """Memory for accumulators, which nobody needs after the block: of this thread, or new where that costs less.

    Args:
        dtype: of their elements.
        rows: how many there are.
        size: the elements of each.
        number: 0 or 1, to have two of them at once.
    """
    if not rows:
        return ()
    nbytes = rows * size * dtype.itemsize
    if nbytes <= _SMALL_BYTES:
        return list(np.empty((rows, size), dtype))
    rooms = _of_thread.__dict__.setdefault("rooms", {})
    memory = rooms.get(number)
    if memory is None or memory.size < nbytes:
        memory = rooms[number] = np.empty(nbytes, np.uint8)
    return list(memory[:nbytes].view(dtype).reshape(rows, size))


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
    """Return the quotients, rounded down, and the remainders of integers divided by `count`.

    Args:
        sources: of one dtype, that of the result.
        count: the number of contributions; neither the sum of so many quotients nor that of the remainders leaves the
            range of 64 bits, but for what wraps back when they are joined.
    """
    divisor = sources[0].dtype.type(count)
    quotients, remainders = zip(*(np.divmod(source, divisor) for source in sources), strict=True)
    return list(quotients), list(remainders)


def join(quotients: np.ndarray | int, remainders: np.ndarray, out: np.ndarray, count: int) -> None:
    """Make the mean, truncated towards zero, from the sums of `shares`.

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
