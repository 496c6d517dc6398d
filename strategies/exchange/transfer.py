"""How gradients travel between replicas in fewer bytes: as 16-bit floats, or as int8 with error feedback.

16-bit floats are cast inside the program that computes them and reduced as they are, in the order of the tree, with
float32 accumulators. Int8 gradients are blocks of 64 values with one power of two as their common scale (so what a
block lost is exactly what it gave away: no rounding in between); every instance gets the blocks of all replicas and
adds them up in the order of the tree in float32. Either way the bits do not depend on the number of instances.

What quantisation loses is not lost: each replica keeps it and adds it to its next gradient (1-bit SGD: Seide et al.,
Interspeech 2014; that such training converges: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np

from collectives import Communicator
from collectives.arrays import aligned_empty
from collectives.reduction import Reduction
from collectives.tree import TreeNode, registers, steps
from strategies.exchange.flat import FLOAT32

BLOCK = 64
"""Values that share a scale: as many float32 results as begin at addresses that XLA reads in place."""

_INT8 = np.dtype(np.int8)
_NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": _INT8}

MANTISSA_BITS = 23
NOT_FINITE = 255  # the exponent of infinity and NaN in float32; as a scale: the block has one of them
LARGEST = 127  # of the values of a block
SHIFT = 6  # a block's largest value is at least 2^6 and below 2^7 in units of its scale
FLIPPED = 254  # 2^-e has this exponent less that of 2^e
_SCALES = (np.arange(256, dtype=np.int32) << MANTISSA_BITS).view(FLOAT32)
_SCALES[NOT_FINITE] = np.nan
_BLOCKS_AT_ONCE = 1 << 10  # their float32 values stay in a core's cache


@dataclass(frozen=True)
class GradientTransfer:
    """In which dtype gradients travel.

    Attributes:
        dtype: float16, bfloat16, int8, or None: each gradient in its own.
    """

    dtype: np.dtype | None = None

    @classmethod
    def parse(cls, dtype: Any) -> GradientTransfer:
        """What `gradient_transfer_dtype` says.

        Args:
            dtype: None, "float16", "bfloat16", "int8", or one of these dtypes of NumPy or JAX.

        Raises:
            ValueError: for anything else.
        """
        if dtype is None:
            return cls()
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = ""
        if name not in _NARROW:
            raise ValueError(
                f"gradient_transfer_dtype is {dtype!r}; gradients travel as {', '.join(map(repr, _NARROW))}, "
                "or with None in the dtypes of their variables"
            )
        return cls(_NARROW[name])

    @property
    def is_quantised(self) -> bool:
        """Whether gradients travel in blocks, see `Int8Layout`; otherwise each travels in `dtype_of` its own."""
        return self.dtype == _INT8

    def dtype_of(self, dtype: Any) -> np.dtype:
        """The dtype in which a gradient of this floating-point dtype is contributed; never a wider one.

        Raises:
            ValueError: where gradients are quantised.
        """
        if self.is_quantised:
            raise ValueError("quantised gradients are not cast; encode them with an Int8Layout")
        own = np.dtype(dtype)
        return own if self.dtype is None or self.dtype.itemsize >= own.itemsize else self.dtype


@dataclass(frozen=True)
class Int8Layout:
    """Where each gradient lies in the payload of a replica: one after another, each in blocks of its own.

    A payload is int8 of shape `(payload_size,)`: first the values of all blocks, 64 each, then the scale of each block.
    A scale is the exponent of a power of two as float32 has it, in one unsigned byte, or 255 where a value of the block
    is NaN or infinite: then all of the block comes out as NaN.

    Attributes:
        shapes: of the gradients, in tree order.
    """

    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Int8Layout:
        """The layout of gradients of the shapes of `leaves`."""
        return cls(tuple(tuple(leaf.shape) for leaf in leaves))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first block of each gradient, and the end."""
        return tuple(accumulate((-(-math.prod(shape) // BLOCK) for shape in self.shapes), initial=0))

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self.starts[-1]

    @property
    def payload_size(self) -> int:
        """Bytes of a replica's payload: 65 for 64 values."""
        return self.blocks * (BLOCK + 1)

    @property
    def result_size(self) -> int:
        """Elements of the float32 result, in which each gradient begins at a multiple of 64."""
        return self.blocks * BLOCK

    def new_result(self) -> np.ndarray:
        """Memory for a result, float32 of shape `(result_size,)`, from where XLA reads in place."""
        return aligned_empty(self.result_size * FLOAT32.itemsize).view(FLOAT32)

    def new_residuals(self) -> list[np.ndarray]:
        """What a replica has lost before its first step: nothing."""
        return [np.zeros(shape, FLOAT32) for shape in self.shapes]

    def views(self, result: np.ndarray) -> list[np.ndarray]:
        """The gradients in the float32 result, each in its shape; nothing is copied."""
        return [
            result[start * BLOCK : start * BLOCK + math.prod(shape)].reshape(shape)
            for start, shape in zip(self.starts, self.shapes, strict=False)
        ]


class Int8Reduction:
    """Adds up the payloads of all replicas in the order of the tree, for one layout.

    Args:
        layout: of the payloads, the same on all instances.
        communicator: connects the instances.
        replicas: how many there are on all instances together; they are spread as evenly as can be, the first
            instances have one more.
    """

    def __init__(self, layout: Int8Layout, communicator: Communicator, replicas: int) -> None:
        self._layout = layout
        self._communicator = communicator
        self._replicas = replicas
        each, more = divmod(replicas, communicator.size)
        self._counts = [each + (rank < more) for rank in range(communicator.size)]
        self._steps = steps(tuple(TreeNode(replica, replica + 1) for replica in range(replicas)))
        self._rows = np.empty((max(1, registers(self._steps)), min(_BLOCKS_AT_ONCE, layout.blocks), BLOCK), FLOAT32)
        if communicator.size > 1:
            shape = (max(self._counts), layout.payload_size)
            self._mine = np.zeros(shape, _INT8)
            self._gathered = np.empty((communicator.size, *shape), _INT8)

    def reduce(self, payloads: Sequence[np.ndarray], out: np.ndarray, op: str = "mean", *, name: str) -> None:
        """The sum or mean over all replicas of all instances; a collective call.

        Args:
            payloads: those of the local replicas, in their order: int8 of shape `(payload_size,)`; not changed.
            out: receives the result: float32 of shape `(result_size,)`, C-contiguous, this instance's own memory (see
                `Int8Layout.new_result`, not `Communicator.allocate`); `Int8Layout.views` finds the gradients in it.
            op: "mean" or "sum".
            name: of the collective.

        Raises:
            CollectiveError: as of `Communicator.all_gather`.
        """
        payloads = self._gather(payloads, name)
        with np.errstate(all="ignore"):  # infinity and NaN are results
            self._add_up(payloads, out)
        Reduction(op, FLOAT32).finish(out, out, self._replicas)

    def _gather(self, payloads: Sequence[np.ndarray], name: str) -> Sequence[np.ndarray]:
        """The payloads of all replicas, in their order."""
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
        """Add some blocks of all replicas; what is not yet all of them lies in rows of memory."""
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
