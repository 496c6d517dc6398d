"""Gradients as int8 with error feedback: the layout of a payload, its encoding, and the sum of all replicas' payloads.

Gradients are cut into blocks of 64 values with one power of two as their common scale. The error of a block is
therefore exact: it is the part that is not sent, without rounding. Every instance gets the blocks of all replicas, and
adds them in float32 in the order of the tree. So the bits do not depend on the number of instances.

Each replica keeps the quantisation error and adds it to its next gradient (error feedback: Seide et al., 1-bit SGD,
Interspeech 2014; its convergence: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import ModuleType

import numpy as np

from collectives import Communicator
from collectives.reduction import Reduction
from collectives.tree import TreeNode, registers, steps
from popdist.instance import replica_blocks
from strategies.exchange.flat import FLOAT32, private_memory
from strategies.typing import Leaf

BLOCK = 64
"""The number of values that share a scale. 64 float32 results begin at addresses that XLA reads in place."""

NOT_FINITE = 255
"""The exponent of infinity and NaN in float32. As a scale it says that a value of the block is infinite or NaN."""

_INT8 = np.dtype(np.int8)
_MANTISSA_BITS = 23
_LARGEST = 127  # the largest absolute value in a block
_SHIFT = 6  # a block's largest value is at least 2^6 and below 2^7 in units of its scale
_FLIPPED = 254  # the float32 exponents of 2^e and 2^-e add up to it
_SCALES = (np.arange(256, dtype=np.int32) << _MANTISSA_BITS).view(FLOAT32)
_SCALES[NOT_FINITE] = np.nan
_BLOCKS_AT_ONCE = 1 << 10  # their float32 values stay in a core's cache


@dataclass(frozen=True)
class Int8Layout:
    """The places of gradients in a replica's payload: one gradient after another, each in its own blocks.

    A payload is int8 of shape `(payload_size,)`: first the values of all blocks, 64 each, then the scale of each block.
    A scale is the float32 exponent of a power of two, in one unsigned byte. If a value of the block is NaN or infinite,
    the scale is 255, and the whole block is decoded as NaN.

    Attributes:
        shapes: Shapes of the gradients, in tree order.
    """

    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Int8Layout:
        """Return the layout of gradients with the shapes of `leaves`."""
        return cls(tuple(tuple(leaf.shape) for leaf in leaves))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first block of each gradient, and the end of the last."""
        return tuple(accumulate((-(-math.prod(shape) // BLOCK) for shape in self.shapes), initial=0))

    @property
    def blocks(self) -> int:
        """The number of blocks of all gradients."""
        return self.starts[-1]

    @property
    def payload_size(self) -> int:
        """The size of a replica's payload in bytes: 65 for 64 values."""
        return self.blocks * (BLOCK + 1)

    @property
    def result_size(self) -> int:
        """The number of elements of the float32 result; each gradient begins at a multiple of 64."""
        return self.blocks * BLOCK

    def new_result(self) -> np.ndarray:
        """Return memory for a result: float32 of shape `(result_size,)`, aligned so that XLA reads it in place."""
        return private_memory((self.result_size,), FLOAT32)

    def new_residuals(self, replicas: int) -> list[np.ndarray]:
        """Return the residuals before the first step: float32 zeros for `replicas` replicas, one array per gradient.

        The residuals of a gradient lie one after another along its first axis; a scalar's residuals have one axis.
        """
        shapes = [shape or (1,) for shape in self.shapes]
        return [np.zeros((replicas * rows, *others), FLOAT32) for rows, *others in shapes]

    def residuals_of_each(self, residuals: Sequence[np.ndarray], replicas: int) -> list[Sequence[np.ndarray]]:
        """Return copies of the residuals of each of `replicas`, in the shapes of the gradients."""
        cut = [np.split(np.array(array), replicas) for array in residuals]
        return [
            [parts[replica].reshape(shape) for parts, shape in zip(cut, self.shapes, strict=True)]
            for replica in range(replicas)
        ]

    def views(self, result: np.ndarray) -> list[np.ndarray]:
        """Return the gradients in the float32 result, each in its shape, without a copy."""
        return [
            result[start * BLOCK : start * BLOCK + math.prod(shape)].reshape(shape)
            for start, shape in zip(self.starts, self.shapes, strict=False)
        ]


@dataclass(frozen=True)
class ArrayLibrary:
    """A library of arrays that can encode gradients: NumPy, JAX while it traces, or PyTorch on any device.

    Attributes:
        functions: Module with amax, asarray, isnan, where and dtypes, under NumPy's names.
        pad: `(array, (0, count))` returns an array of one axis with `count` zeros behind it.
        write: `(into, values, start)` returns `into` with `values` from `start` on; the memory may be the same.
        apart: Returns arrays such that a compiler computes each of them once, before the code that uses them.
    """

    functions: ModuleType
    pad: Callable[[Leaf, tuple[int, int]], Leaf]
    write: Callable[[Leaf, Leaf, int], Leaf]
    apart: Callable[[Sequence[Leaf]], Sequence[Leaf]]


def _padded(array: np.ndarray, padding: tuple[int, int]) -> np.ndarray:
    """Pad like `np.pad`, which takes longer than the rest of the encoding for small gradients."""
    longer = np.zeros(array.size + padding[1], array.dtype)
    longer[: array.size] = array
    return longer


def _write(into: np.ndarray, values: np.ndarray, start: int) -> np.ndarray:
    into[start : start + values.size] = values
    return into


NUMPY = ArrayLibrary(np, _padded, _write, tuple)


def encode(
    layout: Int8Layout,
    leaves: Sequence[Leaf],
    residuals: Sequence[Leaf],
    into: Leaf,
    library: ArrayLibrary,
    weight: Leaf | None = None,
) -> tuple[Leaf, tuple[Leaf, ...]]:
    """Return one replica's payload and its quantisation error.

    A block with NaN or infinity keeps the residual that it had. If the step is not applied, keep the old residuals of
    all blocks. Divide gradients by their loss scale before they are encoded. All libraries give the same bits, except
    that XLA on CPUs flushes subnormal numbers to zero.

    Args:
        layout: Places of gradients in the payload.
        leaves: Gradients, of any floating-point dtypes, in the layout's shapes; not changed.
        residuals: Second result of this replica's last applied step: float32, in the layout's shapes; zeros before the
            first step. Not changed.
        into: int8 of shape `(payload_size,)`, whose memory the payload may take; all of its values are replaced.
        library: Library that made the arrays.
        weight: Scalar that has multiplied the gradients, the weight of this replica's loss; None without one. Residuals
            are not multiplied: the error of a step with large weights would drown the gradients of one with small
            weights. With weight 0 the residuals stay.

    Returns:
        The payload, and the new residuals.
    """
    kept = []
    with np.errstate(all="ignore"):  # infinity and NaN are results
        own = residuals if weight is None else library.apart([residual * weight for residual in residuals])
        for leaf, residual, start in zip(library.apart(leaves), own, layout.starts, strict=False):
            values, scales, lost = _quantise(leaf, residual, library)
            into = library.write(into, values, start * BLOCK)
            into = library.write(into, scales, layout.result_size + start)
            kept.append(lost)
        if weight is not None:
            where = library.functions.where
            kept = [where(weight > 0, lost / weight, old) for lost, old in zip(kept, residuals, strict=True)]
    return into, tuple(kept)


def _quantise(leaf: Leaf, residual: Leaf, library: ArrayLibrary) -> tuple[Leaf, Leaf, Leaf]:
    """Return values int8[n * 64], scales int8[n], and the error, which is float32 and shaped like the gradient."""
    xp = library.functions
    exact = xp.asarray(leaf, dtype=xp.float32) + residual
    blocks = _in_blocks(exact, library)
    largest = xp.amax(abs(blocks), axis=1)  # propagates NaN; over floats, because XLA takes far longer over integers
    exponents = largest.view(xp.int32) >> _MANTISSA_BITS & NOT_FINITE
    is_finite = exponents < NOT_FINITE
    scales = xp.where(is_finite, (exponents - _SHIFT).clip(1, None), NOT_FINITE)
    scales, is_finite = library.apart((scales, is_finite))  # if fused, XLA computes them again for each value
    units = _power_of_two(scales, xp)
    inverses = _power_of_two(_FLIPPED - scales, xp)
    values = (blocks * inverses).round().clip(-_LARGEST, _LARGEST)  # multiplied exactly, rounded half to even
    values = xp.where(is_finite[:, None], values, 0)
    lost = blocks - values * units  # exact; NaN (0 * infinity) in a block with infinity or NaN
    lost = lost.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)
    return (
        xp.asarray(values, dtype=xp.int8).reshape(-1),
        xp.asarray(scales, dtype=xp.uint8).view(xp.int8),
        xp.where(xp.isnan(lost), residual, lost),
    )


def _in_blocks(array: Leaf, library: ArrayLibrary) -> Leaf:
    missing = -math.prod(array.shape) % BLOCK
    flat = array.reshape(-1)
    return (library.pad(flat, (0, missing)) if missing else flat).reshape(-1, BLOCK)


def _power_of_two(exponents: Leaf, functions: ModuleType) -> Leaf:
    """Return 2 to these float32 exponents as a column, made from bits because exp2 may round."""
    return (exponents << _MANTISSA_BITS).view(functions.float32)[:, None]


class Int8Reduction:
    """The sum of the payloads of all replicas in the order of the tree, for one layout.

    Args:
        layout: Layout of the payloads, the same on all instances.
        communicator: Communicator of the instances.
        replicas: Number of replicas of all instances together.
    """

    def __init__(self, layout: Int8Layout, communicator: Communicator, replicas: int) -> None:
        self._layout = layout
        self._communicator = communicator
        self._replicas = replicas
        self._counts = [len(block) for block in replica_blocks(communicator.size, replicas)]
        self._steps = steps(tuple(TreeNode(replica, replica + 1) for replica in range(replicas)))
        self._rows = np.empty((max(1, registers(self._steps)), min(_BLOCKS_AT_ONCE, layout.blocks), BLOCK), FLOAT32)
        if communicator.size > 1:
            shape = (max(self._counts), layout.payload_size)
            self._mine = np.zeros(shape, _INT8)
            self._gathered = np.empty((communicator.size, *shape), _INT8)

    def reduce(self, payloads: Sequence[np.ndarray], out: np.ndarray, op: str = "mean", *, name: str) -> None:
        """Write the sum or mean over all replicas of all instances into `out`. Collective.

        Args:
            payloads: Payloads of the local replicas, in order: int8 of shape `(payload_size,)`; not changed.
            out: Memory for the result, made by `Int8Layout.new_result`; `Int8Layout.views` finds the gradients there.
            op: "mean" or "sum".
            name: Name of the collective.

        Raises:
            CollectiveError: The all-gather failed, see `Communicator.all_gather`.
        """
        payloads = self._gather(payloads, name)
        with np.errstate(all="ignore"):  # infinity and NaN are results
            self._add_up(payloads, out)
        Reduction(op, FLOAT32).finish(out, out, self._replicas)

    def _gather(self, payloads: Sequence[np.ndarray], name: str) -> Sequence[np.ndarray]:
        """Return the payloads of all replicas, in order."""
        if self._communicator.size == 1:
            return payloads
        for row, payload in zip(self._mine[: self._counts[self._communicator.rank]], payloads, strict=True):
            row[...] = payload
        self._communicator.all_gather(self._mine, self._gathered, name=name)
        return [payload for rows, count in zip(self._gathered, self._counts, strict=True) for payload in rows[:count]]

    def _add_up(self, payloads: Sequence[np.ndarray], out: np.ndarray) -> None:
        blocks = self._layout.blocks
        total = out.reshape(blocks, BLOCK)
        values = [payload[: blocks * BLOCK].reshape(blocks, BLOCK) for payload in payloads]
        scales = [_SCALES[payload[blocks * BLOCK :].view(np.uint8)][:, None] for payload in payloads]
        for start in range(0, blocks, _BLOCKS_AT_ONCE):
            some = slice(start, start + _BLOCKS_AT_ONCE)
            self._add_blocks([value[some] for value in values], [scale[some] for scale in scales], total[some])

    def _add_blocks(self, values: Sequence[np.ndarray], scales: Sequence[np.ndarray], total: np.ndarray) -> None:
        """Add some blocks of all replicas; `_rows` holds the partial sums."""
        rows = [total, *self._rows[:, : total.shape[0]]]

        def decoded(number: int, into: np.ndarray) -> np.ndarray:
            into[...] = values[number]
            into *= scales[number]
            return into

        if len(values) == 1:
            decoded(0, total)
        found: list[np.ndarray] = []
        for left, right, register in self._steps:
            into = rows[register]
            one = decoded(left, into) if left < len(values) else found[left - len(values)]
            other = decoded(right, rows[-1]) if right < len(values) else found[right - len(values)]
            found.append(np.add(one, other, out=into))
