"""How gradients travel between replicas in fewer bytes: as 16-bit floats, or as int8 with error feedback.

16-bit floats are cast inside the program that computes them and reduced as they are, in replica order with a float32
accumulator. Int8 gradients are blocks of 64 values with one power of two as their common scale (so what a block lost is
exactly what it gave away: no rounding in between); every instance gets the blocks of all replicas and adds them up in
replica order in float32. Either way the bits do not depend on the number of instances.

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

import jax
import jax.numpy as jnp
import numpy as np

from collectives import Communicator
from collectives.memory import aligned_empty
from collectives.reduction import Reduction
from strategies.flat import FLOAT32

BLOCK = 64
"""Values that share a scale: as many float32 results as begin at addresses that XLA reads in place."""

_INT8 = np.dtype(np.int8)
_NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(jnp.bfloat16), "int8": _INT8}

_MANTISSA_BITS = 23
_NOT_FINITE = 255  # the exponent of infinity and NaN in float32; as a scale: the block has one of them
_MOST = 127  # the largest value of a block
_SHIFT = 6  # a block's largest value is at least 2^6 and below 2^7 in units of its scale
_FLIPPED = 254  # 2^-e has this exponent less that of 2^e
_SCALES = (np.arange(256, dtype=np.int32) << _MANTISSA_BITS).view(FLOAT32)
_SCALES[_NOT_FINITE] = np.nan
_BLOCKS_AT_ONCE = 1 << 10  # their float32 values stay in a core's cache


@dataclass(frozen=True)
class Transfer:
    """In which dtype gradients travel.

    Attributes:
        dtype: float16, bfloat16, int8, or None: each gradient in its own.
    """

    dtype: np.dtype | None = None

    @classmethod
    def parse(cls, dtype: Any) -> Transfer:
        """What `gradient_transfer_dtype` says.

        Args:
            dtype: None, "float16", "bfloat16", "int8", or one of these dtypes of NumPy or JAX.

        Raises:
            ValueError: for anything else.
        """
        if dtype is None:
            return cls()
        try:
            name = jnp.dtype(dtype).name
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
            raise ValueError("quantised gradients are not cast; encode them with Int8Layout")
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
    def _starts(self) -> tuple[int, ...]:
        """The first block of each gradient, and the end."""
        return tuple(accumulate((-(-math.prod(shape) // BLOCK) for shape in self.shapes), initial=0))

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self._starts[-1]

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

    def encode(
        self, leaves: Sequence[jax.Array], residuals: Sequence[jax.Array], into: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """One replica's payload, and what it lost; traceable.

        Blocks that are not finite keep the residual that they had. If the step is not applied, keep the old residuals
        of all of them (and where the gradients are multiplied by a loss scale, divide before they are encoded).

        Args:
            leaves: the gradients, of any floating-point dtypes, in the layout's shapes.
            residuals: what `encode` returned for this replica in its last step that was applied: float32, in the
                layout's shapes; zeros before.
            into: int8 of shape `(payload_size,)`, whose memory the payload may take (donated or not); its values do
                not matter.

        Returns:
            The payload, and the new residuals.
        """
        kept = []
        # As in FlatLayout.flatten: gradients are computed before, and written one by one.
        for leaf, residual, start in zip(jax.lax.optimization_barrier(leaves), residuals, self._starts, strict=False):
            values, scales, lost = _quantise(leaf, residual)
            into = jax.lax.dynamic_update_slice(into, values, (start * BLOCK,))
            into = jax.lax.dynamic_update_slice(into, scales, (self.result_size + start,))
            kept.append(lost)
        return into, tuple(kept)

    def views(self, result: np.ndarray) -> list[np.ndarray]:
        """The gradients in the float32 result, each in its shape; nothing is copied."""
        return [
            result[start * BLOCK : start * BLOCK + math.prod(shape)].reshape(shape)
            for start, shape in zip(self._starts, self.shapes, strict=False)
        ]


class Int8Reduction:
    """Adds up the payloads of all replicas in replica order, for one layout.

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
        self._decoded = np.empty((min(_BLOCKS_AT_ONCE, layout.blocks), BLOCK), FLOAT32)
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
            decoded = self._decoded[: total[some].shape[0]]
            for number, (value, scale) in enumerate(zip(values, scales, strict=True)):
                into = decoded if number else total[some]
                into[...] = value[some]
                into *= scale[some]
                if number:
                    total[some] += decoded


def _quantise(leaf: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The blocks of a gradient: values int8[n * 64], scales int8[n]; and what they lost, float32 like the gradient."""
    exact = leaf.astype(FLOAT32) + residual
    blocks = _in_blocks(exact)
    largest = jnp.max(jnp.abs(blocks), axis=1)  # NaN if one of them is; of floats, because integers take XLA far longer
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> _MANTISSA_BITS & _NOT_FINITE
    is_finite = exponents < _NOT_FINITE
    scales = jnp.where(is_finite, jnp.maximum(exponents - _SHIFT, 1), _NOT_FINITE)
    scales, is_finite = jax.lax.optimization_barrier((scales, is_finite))  # fused, each value would compute its own
    units = _power_of_two(jnp.minimum(scales, _FLIPPED - 1))
    inverses = _power_of_two(jnp.maximum(_FLIPPED - scales, 1))
    values = jnp.clip(jnp.round(blocks * inverses), -_MOST, _MOST)  # multiplied exactly, rounded half to even
    values = jnp.where(is_finite[:, None], values, 0)
    lost = (blocks - values * units).reshape(-1)[: exact.size].reshape(exact.shape)  # exact
    stays = jnp.broadcast_to(~is_finite[:, None], blocks.shape).reshape(-1)[: exact.size].reshape(exact.shape)
    return (
        values.astype(jnp.int8).reshape(-1),
        jax.lax.bitcast_convert_type(scales.astype(jnp.uint8), jnp.int8),
        jnp.where(stays, residual, lost),
    )


def _in_blocks(values: jax.Array) -> jax.Array:
    count = -(-values.size // BLOCK)
    return jnp.pad(values.reshape(-1), (0, count * BLOCK - values.size)).reshape(count, BLOCK)


def _power_of_two(exponents: jax.Array) -> jax.Array:
    """The powers of two that have these exponents in float32, as a column; their bits, because exp2 may round."""
    return jax.lax.bitcast_convert_type(exponents << _MANTISSA_BITS, FLOAT32)[:, None]
