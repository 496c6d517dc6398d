"""The layout of a replica's gradients in flat buffers, and the memory for their means.

Gradients leave the programs that compute them flat, one buffer per dtype, or as int8 with error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from collectives.arrays import aligned_empty
from strategies.exchange.flat import FLOAT32, FlatLayout
from strategies.exchange.means import Bucket
from strategies.exchange.transfer import BLOCK, FLIPPED, LARGEST, MANTISSA_BITS, NOT_FINITE, SHIFT, Int8Layout
from strategies.programs.segments import Part
from strategies.replicas.shards import Shards

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]

TAIL = 0  # the first result of a gradient function, before the gradients


@dataclass(frozen=True)
class Leaving:
    """The values that leave a replica to be averaged.

    Attributes:
        leaves: the shapes and dtypes of the gradients, and of others behind them that are averaged like them.
        shards: how the means of gradients that have a buffer alone are cut, of which this instance gets its part only;
            None for whole means. A gradient that travels in pieces is not cut, nor are others of its bucket.
        whole: how many of the last leaves are never cut into shards.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    shards: Shards | None = None
    whole: int = 0

    def of_gradients(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the results of a segment that are averaged over replicas."""
        return tuple(part for part in parts if TAIL < part.result <= TAIL + len(self.leaves))

    def shape_of(self, part: Part) -> jax.ShapeDtypeStruct:
        """Return the shape of a gradient, or of the rows of it that are a part."""
        leaf = self.leaves[part.result - TAIL - 1]
        if part.rows is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        start, stop = part.rows
        return jax.ShapeDtypeStruct((stop - start, *leaf.shape[1:]), leaf.dtype)

    def shards_of(self, parts: Sequence[Part]) -> Shards | None:
        """Return the shards of the means of gradients that travel together; None if they stay whole."""
        return None if any(part.rows for part in parts) else self.shards

    def is_cut(self, part: Part, shards: Shards) -> bool:
        """Return whether the mean of a gradient is cut where its bucket is."""
        return part.result <= TAIL + len(self.leaves) - self.whole and shards.divides(self.shape_of(part))

    def layout(self, parts: Sequence[Part], tail: int) -> FlatLayout:
        """Return the layout of a segment's averaged results in flat buffers, with a tail of so many values."""
        leaves = [self.shape_of(part) for part in self.of_gradients(parts)]
        shards = self.shards_of(parts)
        return FlatLayout.of(leaves, tail, shards.replicas if shards else 1)


class MeansMemory:
    """Memory for the means of what leaves replicas.

    Args:
        leaving: what that is.
        allocate: makes memory.
    """

    def __init__(self, leaving: Leaving, allocate: Allocate) -> None:
        self._leaving = leaving
        self._allocate = allocate
        self._means: dict[int, np.ndarray] = {}

    @property
    def means(self) -> list[np.ndarray]:
        """The memory of the means, once there is a bucket for each; of means that are cut this instance's part."""
        return [self._means[number] for number in range(TAIL + 1, TAIL + 1 + len(self._leaving.leaves))]

    def bucket(self, name: str, parts: Sequence[Part], layout: FlatLayout) -> Bucket:
        """Memory for what a segment finishes.

        Args:
            name: of the collectives.
            parts: what it finishes.
            layout: of that.
        """
        of_gradients = self._leaving.of_gradients(parts)
        shards = self._leaving.shards_of(parts)
        results: list[np.ndarray] = []
        scattered: set[int] = set()
        for place, buffer in enumerate(layout.buffers):
            part = of_gradients[buffer.leaves[0]] if buffer.is_of_one else None
            if part is not None and part.rows is not None:
                results.append(self._piece(part))
            elif part is not None and shards is not None and self._leaving.is_cut(part, shards):
                results.append(self._share(part, shards))
                scattered.add(place)
            else:
                results.append(self._allocate((buffer.size,), buffer.dtype))
        for leaf, part in enumerate(of_gradients):
            if part.result not in self._means:
                self._means[part.result] = layout.view(leaf, results)
        return Bucket(name, layout, tuple(results), frozenset(scattered))

    def _piece(self, part: Part) -> np.ndarray:
        """Return the place of some rows in the mean of the whole gradient."""
        assert part.rows is not None
        leaf = self._leaving.leaves[part.result - TAIL - 1]
        if part.result not in self._means:
            self._means[part.result] = self._allocate(leaf.shape, np.dtype(leaf.dtype))
        rows: np.ndarray = self._means[part.result][slice(*part.rows)].reshape(-1)
        return rows

    def _share(self, part: Part, shards: Shards) -> np.ndarray:
        """Memory for this instance's part of the mean of a gradient."""
        leaf = self._leaving.leaves[part.result - TAIL - 1]
        shape, dtype = shards.shape(leaf), np.dtype(leaf.dtype)
        room: np.ndarray = aligned_empty(math.prod(shape) * dtype.itemsize).view(dtype)
        self._means[part.result] = room.reshape(shape)
        return room


def not_made(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate arrays that take no memory and cannot be written to, for callers that only look at shapes."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def flatten(
    layout: FlatLayout, leaves: Sequence[jax.Array], tail: jax.Array | None, into: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Write leaves and tail, if any, into buffers, in the order of `layout.buffers`, whose gaps are zero; traceable."""
    written = {buffer.name: array for buffer, array in zip(layout.buffers, into, strict=True)}
    # Written one by one: XLA's CPU backend turns a concatenation into an element-wise loop that pulls whatever
    # produced the parts into it (measured: 50 times slower than the gradients themselves).
    for leaf, (name, start) in zip(jax.lax.optimization_barrier(leaves), layout.places, strict=True):
        flat = leaf.reshape(-1)
        is_alone = flat.size == written[name].size and name != FLOAT32.name
        written[name] = flat if is_alone else jax.lax.dynamic_update_slice(written[name], flat, (start,))
    if tail is not None:
        position = written[FLOAT32.name].size - layout.tail
        written[FLOAT32.name] = jax.lax.dynamic_update_slice(written[FLOAT32.name], tail, (position,))
    return tuple(written.values())


def encode(
    layout: Int8Layout, leaves: Sequence[jax.Array], residuals: Sequence[jax.Array], into: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return one replica's payload, and what it lost; traceable.

    Blocks that are not finite keep the residual that they had. If the step is not applied, keep the old residuals
    of all of them (and where the gradients are multiplied by a loss scale, divide before they are encoded).

    Args:
        layout: where gradients lie in the payload.
        leaves: the gradients, of any floating-point dtypes, in the layout's shapes.
        residuals: what `encode` returned for this replica in its last step that was applied: float32, in the
            layout's shapes; zeros before.
        into: int8 of shape `(payload_size,)`, whose memory the payload may take (donated or not); its values do
            not matter.

    Returns:
        The payload, and the new residuals.
    """
    kept = []
    # As in `flatten`: gradients are computed before, and written one by one.
    for leaf, residual, start in zip(jax.lax.optimization_barrier(leaves), residuals, layout.starts, strict=False):
        values, scales, lost = _quantise(leaf, residual)
        into = jax.lax.dynamic_update_slice(into, values, (start * BLOCK,))
        into = jax.lax.dynamic_update_slice(into, scales, (layout.result_size + start,))
        kept.append(lost)
    return into, tuple(kept)


def _quantise(leaf: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantise a gradient: return values int8[n * 64], scales int8[n], and the error, float32 like the gradient."""
    exact = leaf.astype(FLOAT32) + residual
    blocks = _in_blocks(exact)
    largest = jnp.max(jnp.abs(blocks), axis=1)  # NaN if one of them is; of floats, because integers take XLA far longer
    exponents = jax.lax.bitcast_convert_type(largest, jnp.int32) >> MANTISSA_BITS & NOT_FINITE
    is_finite = exponents < NOT_FINITE
    scales = jnp.where(is_finite, jnp.maximum(exponents - SHIFT, 1), NOT_FINITE)
    scales, is_finite = jax.lax.optimization_barrier((scales, is_finite))  # fused, each value would compute its own
    units = _power_of_two(jnp.minimum(scales, FLIPPED - 1))
    inverses = _power_of_two(jnp.maximum(FLIPPED - scales, 1))
    values = jnp.clip(jnp.round(blocks * inverses), -LARGEST, LARGEST)  # multiplied exactly, rounded half to even
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
    """Return the powers of two with these exponents in float32, as a column, made of bits: exp2 may round."""
    return jax.lax.bitcast_convert_type(exponents << MANTISSA_BITS, FLOAT32)[:, None]
