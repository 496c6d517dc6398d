"""The layout of a replica's gradients in flat buffers, and the memory for their means.

Gradients leave the programs that compute them flat, one buffer per dtype, or as int8 with error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from strategies.exchange.flat import FlatLayout
from strategies.exchange.int8 import ArrayLibrary
from strategies.exchange.means import Allocate, Bucket
from strategies.exchange.shards import Shards
from strategies.jax.programs.segments import Part

TAIL = 0  # the first result of a gradient function, before the gradients


@dataclass(frozen=True)
class Leaving:
    """The layout of the values that leave a replica to be averaged.

    Attributes:
        leaves: Shapes and dtypes of the gradients, followed by other values that are averaged like them.
        shards: Division of the means that have their own buffer; this instance then gets only its part. None for whole
            means. If a gradient travels in pieces, no mean of its bucket is cut.
        whole: Number of last leaves that are never cut into shards.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    shards: Shards | None = None
    whole: int = 0

    def of_gradients(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the results of a segment that are averaged over replicas."""
        return tuple(part for part in parts if TAIL < part.result <= TAIL + len(self.leaves))

    def shape_of(self, part: Part) -> jax.ShapeDtypeStruct:
        """Return the shape of a gradient, or of those of its rows that `part` names."""
        leaf = self.leaves[part.result - TAIL - 1]
        if part.rows is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        start, stop = part.rows
        return jax.ShapeDtypeStruct((stop - start, *leaf.shape[1:]), leaf.dtype)

    def shards_of(self, parts: Sequence[Part]) -> Shards | None:
        """Return the shards of the means of gradients that travel together, or None if they stay whole."""
        return None if any(part.rows for part in parts) else self.shards

    def sizes(self, parts: Sequence[Part]) -> dict[int, int]:
        """Return the number of elements of each cut mean that this instance gets, by its place in a bucket."""
        shards, of_gradients = self.shards_of(parts), self.of_gradients(parts)
        if shards is None:
            return {}
        last = TAIL + len(self.leaves) - self.whole
        sizes = shards.sizes([self.shape_of(part) for part in of_gradients])
        return {leaf: size for leaf, size in sizes.items() if of_gradients[leaf].result <= last}

    def layout(self, parts: Sequence[Part], tail: int) -> FlatLayout:
        """Return the layout of a segment's averaged results in flat buffers, with a tail of `tail` values."""
        leaves = [self.shape_of(part) for part in self.of_gradients(parts)]
        shards = self.shards_of(parts)
        return FlatLayout.of(leaves, tail, shards.replicas if shards else 1)


class MeansMemory:
    """The memory for the means of the values that leave replicas.

    Args:
        leaving: Layout of these values.
        allocate: Function that makes memory.
    """

    def __init__(self, leaving: Leaving, allocate: Allocate) -> None:
        self._leaving = leaving
        self._allocate = allocate
        self._means: dict[int, np.ndarray] = {}

    @property
    def means(self) -> list[np.ndarray]:
        """The memory of all means, or of this instance's part if a mean is cut. Call `bucket` for all of them first."""
        return [self._means[number] for number in range(TAIL + 1, TAIL + 1 + len(self._leaving.leaves))]

    def bucket(self, name: str, parts: Sequence[Part], layout: FlatLayout) -> Bucket:
        """Return a bucket with memory for the means of a segment's results.

        Args:
            name: Name of the collectives.
            parts: Results of the segment.
            layout: Layout of these results.
        """
        of_gradients = self._leaving.of_gradients(parts)
        pieces = {
            layout.buffer_of(leaf): self._piece(part)
            for leaf, part in enumerate(of_gradients)
            if part.rows is not None and layout.buffers[layout.buffer_of(leaf)].is_of_one
        }
        bucket = Bucket.of(name, layout, self._allocate, self._leaving.sizes(parts), pieces)
        shards = self._leaving.shards_of(parts)
        for leaf, part in enumerate(of_gradients):
            mean = bucket.mean(leaf)
            if shards is not None and layout.buffer_of(leaf) in bucket.scattered:
                mean = mean.reshape(shards.shape(self._leaving.shape_of(part)))
            self._means.setdefault(part.result, mean)
        return bucket

    def _piece(self, part: Part) -> np.ndarray:
        """Return the memory for some rows, inside of the mean of the whole gradient."""
        assert part.rows is not None
        leaf = self._leaving.leaves[part.result - TAIL - 1]
        if part.result not in self._means:
            self._means[part.result] = self._allocate(leaf.shape, np.dtype(leaf.dtype))
        rows: np.ndarray = self._means[part.result][slice(*part.rows)].reshape(-1)
        return rows


def flatten(
    layout: FlatLayout, leaves: Sequence[jax.Array], tail: jax.Array | None, into: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Write leaves, and the tail if any, into buffers in the order of `layout.buffers`; traceable. Gaps are zero."""
    written = list(into)
    # Written one by one: XLA:CPU turns a concatenation into an element-wise loop, and fuses the code that produced its
    # parts into that loop (measured: 50 times slower than the gradients themselves).
    for leaf, (number, start) in zip(jax.lax.optimization_barrier(leaves), layout.places, strict=True):
        flat = leaf.reshape(-1)
        is_alone = number > 0 and flat.size == written[number].size
        written[number] = flat if is_alone else jax.lax.dynamic_update_slice(written[number], flat, (start,))
    if tail is not None:
        written[0] = jax.lax.dynamic_update_slice(written[0], tail, (written[0].size - layout.tail,))
    return tuple(written)


XLA = ArrayLibrary(
    jnp,
    jnp.pad,
    lambda into, values, start: jax.lax.dynamic_update_slice(into, values, (start,)),
    jax.lax.optimization_barrier,
)
"""The functions by which `exchange.int8.encode` is traced. They write leaves one by one, as `flatten` does."""
