"""How what leaves a replica lies in buffers, and the memory for its means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from collectives.arrays import aligned_empty
from strategies.exchange.flat import FlatLayout
from strategies.exchange.means import Bucket
from strategies.programs.segments import Part
from strategies.replicas.shards import Shards

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]

TAIL = 0  # the first result of a gradient function, before the gradients


@dataclass(frozen=True)
class Leaving:
    """What leaves a replica to be averaged.

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
        """Those that are averaged, of what a segment finishes."""
        return tuple(part for part in parts if TAIL < part.result <= TAIL + len(self.leaves))

    def shape_of(self, part: Part) -> jax.ShapeDtypeStruct:
        """The shape of a gradient, or of the rows of it that are a part."""
        leaf = self.leaves[part.result - TAIL - 1]
        if part.rows is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        start, stop = part.rows
        return jax.ShapeDtypeStruct((stop - start, *leaf.shape[1:]), leaf.dtype)

    def shards_of(self, parts: Sequence[Part]) -> Shards | None:
        """How the means of gradients that travel together are cut."""
        return None if any(part.rows for part in parts) else self.shards

    def is_cut(self, part: Part, shards: Shards) -> bool:
        """Whether the mean of a gradient is cut where its bucket is."""
        return part.result <= TAIL + len(self.leaves) - self.whole and shards.divides(self.shape_of(part))

    def layout(self, parts: Sequence[Part], tail: int) -> FlatLayout:
        """How what a segment finishes lies in buffers, with so many values behind it."""
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
        """Where the means are, once there is a bucket for each; of those that are cut this instance's part."""
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
        """The place of some rows in the mean of the whole gradient."""
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
    """An `Allocate` for those who only look: arrays that take no memory, and cannot be written to."""
    return np.broadcast_to(np.zeros((), dtype), shape)
