"""Many arrays in one flat buffer per dtype, and views of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

FLOAT32 = np.dtype(np.float32)
_ALIGNMENT_BYTES = 64  # XLA reads host memory in place only from such addresses


@dataclass(frozen=True)
class FlatLayout:
    """Where each leaf lies in the buffer of its dtype; a tail of float32 values follows the float32 leaves.

    Leaves begin at multiples of 64 bytes; the gaps are zero.

    Attributes:
        shapes: of the leaves, in tree order.
        dtypes: of the leaves.
        tail: how many float32 values follow.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    tail: int

    @classmethod
    def of(cls, leaves: Sequence[Any], tail: int) -> FlatLayout:
        """The layout of arrays like `leaves`."""
        return cls(tuple(leaf.shape for leaf in leaves), tuple(np.dtype(leaf.dtype) for leaf in leaves), tail)

    @cached_property
    def sizes(self) -> dict[np.dtype, int]:
        """The elements of each buffer; the one of float32, which has the tail, comes first."""
        return self._places[1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each leaf begins in the buffer of its dtype, in elements."""
        return self._places[0]

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], dict[np.dtype, int]]:
        ends = {FLOAT32: 0}
        starts = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            alignment = _ALIGNMENT_BYTES // dtype.itemsize
            start = -(-ends.get(dtype, 0) // alignment) * alignment
            starts.append(start)
            ends[dtype] = start + math.prod(shape)
        ends[FLOAT32] += self.tail
        return tuple(starts), ends

    def flatten(self, leaves: Sequence[jax.Array], tail: jax.Array, into: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Write leaves and tail into buffers, one per dtype in the order of `sizes`, whose gaps are zero; traceable."""
        buffers = dict(zip(self.sizes, into, strict=True))
        # Written one by one: XLA's CPU backend turns a concatenation into an element-wise loop that pulls whatever
        # produced the parts into it (measured: 50 times slower than the gradients themselves).
        for leaf, start, dtype in zip(jax.lax.optimization_barrier(leaves), self.starts, self.dtypes, strict=True):
            buffers[dtype] = jax.lax.dynamic_update_slice(buffers[dtype], leaf.reshape(-1), (start,))
        position = self.sizes[FLOAT32] - self.tail
        buffers[FLOAT32] = jax.lax.dynamic_update_slice(buffers[FLOAT32], tail, (position,))
        return tuple(buffers.values())

    def views(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The leaves in host buffers, nothing copied."""
        of_dtype = dict(zip(self.sizes, buffers, strict=True))
        return [
            of_dtype[dtype][start : start + math.prod(shape)].reshape(shape)
            for shape, dtype, start in zip(self.shapes, self.dtypes, self.starts, strict=True)
        ]

    def tail_view(self, buffers: Sequence[np.ndarray]) -> np.ndarray:
        """The tail in host buffers, nothing copied."""
        return buffers[0][buffers[0].size - self.tail :]
