"""Flat buffers for many arrays: one per dtype, one for each large array, and views of the arrays inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from collectives.arrays import aligned_empty
from strategies.typing import Leaf

Array = TypeVar("Array", bound=Leaf)
"""A flat array of NumPy or JAX."""

FLOAT32 = np.dtype(np.float32)
LARGE_BYTES = 1 << 20
"""The size from which a leaf has its own buffer, because copying it costs more than another all-reduce. Flattening all
gradients of an MLP with 1.9 million variables takes 1.1 ms of a step of 9.4 ms."""
ALIGNMENT_BYTES = 64
"""XLA on CPUs reads host memory in place only from multiples of this address."""


def private_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return memory of this process, aligned so that XLA reads it in place."""
    return aligned_empty(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def not_made(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return read-only arrays without memory, for callers that need only shapes and dtypes."""
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclass(frozen=True)
class Buffer:
    """A flat buffer.

    Attributes:
        name: Name of its dtype; followed by the leaf's number if one large leaf has it alone.
        dtype: Dtype of its elements.
        size: Number of elements.
        leaves: Numbers of the leaves inside.
        starts: First element of each of these leaves.
    """

    name: str
    dtype: np.dtype
    size: int
    leaves: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def is_of_one(self) -> bool:
        """Whether the buffer holds one large leaf alone."""
        return self.name != self.dtype.name


@dataclass(frozen=True)
class FlatLayout:
    """The place of each leaf: in the flat buffer of its dtype, or in its own buffer if the leaf is large.

    In a flat buffer leaves begin at multiples of 64 bytes, and the gaps are zero. A tail of float32 values follows the
    float32 leaves. A leaf with its own buffer is padded with zeros to a multiple of `multiple` elements.

    Attributes:
        shapes: Shapes of the leaves, in tree order.
        dtypes: Dtypes of the leaves.
        tail: Number of float32 values behind the float32 leaves.
        multiple: Divisor of the size of a buffer that holds one large leaf, in elements.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    tail: int
    multiple: int = 1

    @classmethod
    def of(cls, leaves: Sequence[Leaf], tail: int, multiple: int = 1) -> FlatLayout:
        """Return the layout of arrays with the shapes and dtypes of `leaves`."""
        shapes, dtypes = tuple(leaf.shape for leaf in leaves), tuple(np.dtype(leaf.dtype) for leaf in leaves)
        return cls(shapes, dtypes, tail, multiple)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The number of each leaf's buffer, and the first element of the leaf there."""
        found = {
            leaf: (number, start)
            for number, buffer in enumerate(self.buffers)
            for leaf, start in zip(buffer.leaves, buffer.starts, strict=True)
        }
        return tuple(found[leaf] for leaf in range(len(found)))

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers; the float32 buffer, which has the tail, comes first."""
        dtypes, ends = {FLOAT32.name: FLOAT32}, {FLOAT32.name: 0}
        lying: dict[str, list[tuple[int, int]]] = {FLOAT32.name: []}
        for number, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            size = math.prod(shape)
            name = f"{dtype.name}/{number}" if size * dtype.itemsize >= LARGE_BYTES else dtype.name
            alignment = ALIGNMENT_BYTES // dtype.itemsize
            start = -(-ends.get(name, 0) // alignment) * alignment
            lying.setdefault(name, []).append((number, start))
            dtypes[name], ends[name] = dtype, start + size
            if name != dtype.name:
                ends[name] = -(-size // self.multiple) * self.multiple
        ends[FLOAT32.name] += self.tail
        buffers = []
        for name, end in ends.items():
            leaves, starts = zip(*lying[name], strict=True) if lying[name] else ((), ())
            buffers.append(Buffer(name, dtypes[name], end, leaves, starts))
        return tuple(buffers)

    def views(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all leaves as views of buffers; on the host nothing is copied."""
        return [self.view(leaf, arrays) for leaf in range(len(self.shapes))]

    def view(self, leaf: int, arrays: Sequence[Array]) -> Array:
        """Return the leaf with that number as a view of buffers; on the host nothing is copied."""
        shape, (number, start) = self.shapes[leaf], self.places[leaf]
        found: Array = arrays[number][start : start + math.prod(shape)].reshape(shape)
        return found

    def buffer_of(self, leaf: int) -> int:
        """Return the number of the buffer that holds a leaf."""
        return self.places[leaf][0]

    def tail_view(self, arrays: Sequence[Array]) -> Array:
        """Return the tail as a view of buffers; on the host nothing is copied."""
        found: Array = arrays[0][arrays[0].size - self.tail :]
        return found
