"""The arithmetic of ordered reductions: contributions are combined in the order of a tree, block by block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from collectives.arrays import accumulator_dtype
from collectives.kernel import Kernel, kernel
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
_SMALL_BYTES = 1 << 16  # larger memory would be requested from the operating system for each block

_IN_KERNEL = frozenset({np.dtype(np.float32), np.dtype(np.float64)})

_of_thread = threading.local()


def _quietly(function: Callable[..., None], *arguments: object) -> None:
    """Call `function` with NumPy's floating-point warnings off: infinity and NaN are valid results.

    One `contextvars` context per thread has the effect of `np.errstate` in a tenth of the time.
    """
    try:
        context: Context = _of_thread.context
    except AttributeError:
        context = _of_thread.context = Context()
        context.run(np.seterr, all="ignore")
    context.run(function, *arguments)


def normalise_op(op: str) -> str:
    """Return the reduction's name in lower case.

    Raises:
        ValueError: `op` is not one of OPERATIONS, in any case.
    """
    lower = str(op).lower()
    if lower not in OPERATIONS:
        raise ValueError(f"Unsupported reduce op: {op!r}; use one of {', '.join(OPERATIONS)}")
    return lower


@dataclass(frozen=True, eq=False)  # hashed on the hot path, so by identity
class Reduction:
    """A reduction of arrays of one dtype in the order of the tree (`collectives.tree`).

    16-bit floats are added in float32 and rounded once. A mean is divided once. Sums of integers wrap around, as in
    NumPy. A mean of integers is truncated towards zero, as in C, and is exact even if their sum does not fit into the
    dtype.
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
        """Whether quotients and remainders are added, because no dtype holds the sum: the mean of 64-bit integers.

        A caller that handles contributions one by one reduces the two parts of `shares` to sums, and `join`s them.
        """
        return self.op == "mean" and self.dtype.kind in "iu" and self.dtype.itemsize == 8

    def dtype_of(self, node: TreeNode) -> np.dtype:
        """Return the dtype of a node's values in messages; a leaf, i.e. one contribution, keeps its own dtype."""
        return self.dtype if node.is_leaf else self.accumulator

    @cached_property
    def ufunc(self) -> np.ufunc:
        """The NumPy function that combines two contributions."""
        return _UFUNCS[self.op]

    @cached_property
    def is_native(self) -> bool:
        """Whether the native kernel is there and knows this reduction."""
        return self._kernel is not None

    @cached_property
    def _kernel(self) -> Kernel | None:
        """The native kernel, if it knows this reduction."""
        return kernel() if self.op in ("sum", "mean") and self.dtype in _IN_KERNEL else None

    def fold(self, sources: Sequence[np.ndarray], into: np.ndarray, nodes: tuple[TreeNode, ...] | Order = ()) -> None:
        """Combine `sources` into the partial result `into` (accumulator dtype, same shape, 1-D).

        Args:
            sources: Values of neighbouring nodes of the tree.
            into: Array for the partial result; may be one of the sources.
            nodes: Nodes of the sources in the same order, or their `order_of`; default: the leaves from replica 0 on.
        """
        order = _order(sources, nodes)
        if self._kernel is None or not self._kernel.combine(order.steps, sources, into, 0):
            _quietly(self._by_blocks, self._fold, sources, into, order, len(sources))

    def reduce(
        self, sources: Sequence[np.ndarray], out: np.ndarray, count: int, nodes: tuple[TreeNode, ...] | Order = ()
    ) -> None:
        """Combine `sources` and finish the result into `out` (the reduction's dtype, 1-D).

        Args:
            sources: 1-D arrays of `out`'s size that cover the whole tree; partial results have the accumulator dtype.
            out: Array for the result; may be one of the sources.
            count: Number of replicas, for the mean.
            nodes: Nodes of the sources in the same order, or their `order_of`; default: the leaves from replica 0 on.
        """
        order = _order(sources, nodes)
        divisor = count if self.op == "mean" else 0
        if self._kernel is None or not self._kernel.combine(order.steps, sources, out, divisor):
            _quietly(self._by_blocks, self._reduce, sources, out, order, count)

    def _by_blocks(
        self,
        combine: Callable[[Sequence[np.ndarray], np.ndarray, Order, int], None],
        sources: Sequence[np.ndarray],
        out: np.ndarray,
        order: Order,
        count: int,
    ) -> None:
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
            if len(sources) == 2:  # the hot path: two ranks with small gradients
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
        """Add short arrays. Intermediate sums use accumulators; `total` is the lowest accumulator if possible."""
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
        if left.dtype != out.dtype and right.dtype != out.dtype:  # NumPy would add in the narrower dtype
            out[...] = left
            left = out
        self.ufunc(left, right, out=out)

    def finish(self, total: np.ndarray, out: np.ndarray, count: int) -> None:
        """Finish the complete partial result `total` into `out`. `total` is overwritten and may be `out` itself."""
        _quietly(self._finish, total, out, count)

    def _finish(self, total: np.ndarray, out: np.ndarray, count: int) -> None:
        if self.op == "mean":
            _divide(total, out, count)
        elif total is not out:
            out[...] = total


class Order:
    """The order of additions of some sources, and the accumulators that they need.

    Args:
        steps: Additions, from `collectives.tree.steps`.

    Attributes:
        before_last: All steps except the last one.
        left: Left operand of the last step.
        right: Right operand of the last step.
        rows: Number of accumulators.
        late: Sources that are read after the lowest accumulator was first written.
        steps: All steps for the native kernel, as 32-bit integers.
    """

    __slots__ = ("before_last", "late", "left", "right", "rows", "steps")

    def __init__(self, steps: tuple[TreeSum, ...]) -> None:
        self.before_last = steps[:-1]
        self.steps = np.array(steps, np.int32).tobytes()
        self.left, self.right, _ = steps[-1] if steps else (0, 0, 0)
        self.rows = registers(steps)
        count, begun = len(steps) + 1, [step.register for step in steps].index(0) + 1 if steps else 0
        self.late = [number for step in steps[begun:] for number in step[:2] if number < count]


@lru_cache(1024)
def order_of(nodes: tuple[TreeNode, ...] | int) -> Order:
    """Return the order in which nodes are added; a number stands for the leaves of that many replicas."""
    if isinstance(nodes, int):
        nodes = tuple(TreeNode(replica, replica + 1) for replica in range(nodes))
    return Order(steps(nodes))


def _order(sources: Sequence[np.ndarray], nodes: tuple[TreeNode, ...] | Order) -> Order:
    return nodes if isinstance(nodes, Order) else order_of(nodes or len(sources))


def _rows(dtype: np.dtype, rows: int, size: int, number: int) -> Sequence[np.ndarray]:
    """Return scratch memory for accumulators, used within one block only: this thread's, or new memory if small.

    Args:
        dtype: Dtype of the elements.
        rows: Number of accumulators.
        size: Number of elements of each.
        number: Number of the scratch area, 0 or 1, so that two can be in use.
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
        elif count & (count - 1) == 0:  # 1/2^k: the same bits as a division, several times faster
            quotient = np.multiply(total, total.dtype.type(1 / count), out=total)
        else:
            quotient = np.divide(total, total.dtype.type(count), out=total)
        if quotient is not out:
            out[...] = quotient
        return
    if total.itemsize < 4:  # the count may not fit into the dtype
        total = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
    join(0, total, out, count)


def shares(sources: Sequence[np.ndarray], count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Divide integers by `count`; return the quotients, rounded down, and the remainders.

    Args:
        sources: Arrays of one dtype, the dtype of the result.
        count: Number of contributions. The sums of `count` quotients and of `count` remainders fit into 64 bits, apart
            from wrap-around that `join` undoes.
    """
    divisor = sources[0].dtype.type(count)
    quotients, remainders = zip(*(np.divmod(source, divisor) for source in sources), strict=True)
    return list(quotients), list(remainders)


def join(quotients: np.ndarray | int, remainders: np.ndarray, out: np.ndarray, count: int) -> None:
    """Compute the mean, truncated towards zero, from the sums of `shares`.

    Args:
        quotients: Sum of the quotients.
        remainders: Sum of the remainders.
        out: Array for the mean.
        count: Number of contributions.
    """
    carried, left = np.divmod(remainders, remainders.dtype.type(count))
    rounded_down = quotients + carried
    if rounded_down.dtype.kind == "i":
        rounded_down += (rounded_down < 0) & (left != 0)
    out[...] = rounded_down
