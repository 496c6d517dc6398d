"""Parts of arrays that are cut into shards: inside a program, or as leaves of a state, to be gathered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import strategies.trees as trees
from strategies.exchange.copies import Rows
from strategies.exchange.shards import Shards
from strategies.holding import Find, Holding, bytes_of
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.late_jax import jax, jnp
from strategies.typing import Leaf, Tree


def shards_of(replicas: Replicas, min_elements: int, keeps_copies: bool = False) -> Shards:
    """Return the division of arrays among replicas.

    Args:
        replicas: Replicas of all instances.
        min_elements: Least number of elements of an array that is cut.
        keeps_copies: Whether instances also have copies of each other's parts, if the job goes on after a loss.
    """
    number, holding = replicas.num_replicas_in_sync, replicas.holding
    blocks = len(holding.starts) if keeps_copies else 1
    return Shards(number, holding.slots, min_elements, blocks, number % replicas.num_instances == 0)


def take(shards: Shards, leaf: jax.Array, first: jax.Array) -> jax.Array:
    """Return an instance's part of an array; traceable.

    Args:
        shards: Division of the array.
        leaf: Array, whole.
        first: First replica of each block of the instance, int32.
    """
    if not shards.divides(leaf):
        return leaf
    flat, part = leaf.reshape(-1), shards.part(leaf)
    missing = (shards.replicas + (not shards.is_even)) * part - flat.size
    if missing:
        flat = jnp.pad(flat, (0, missing))
    starts = jnp.reshape(first, (shards.blocks,))
    blocks = [jax.lax.dynamic_slice(flat, (start * part,), (shards.local * part,)) for start in starts]
    return (jnp.concatenate(blocks) if len(blocks) > 1 else blocks[0]).reshape(shards.shape(leaf))


def replica_rows(array: Leaf, holding: Holding) -> Find:
    """Return a function that finds replicas' rows, as bytes, in an array of parts of equal size; see `Holding.place`.

    Args:
        array: Parts for `holding`, in `slots` places for each of its blocks.
        holding: Replicas whose parts they are.
    """

    def find(replicas: range) -> np.ndarray:
        rows = bytes_of(on_host(array), len(holding.starts) * holding.slots)
        first = holding.place(replicas.start)
        return rows[first : first + len(replicas)]

    return find


def on_host(array: Leaf) -> np.ndarray:
    """Return an array on the host, without a copy if it lies on one CPU device."""
    is_on_one = isinstance(array, jax.Array) and len(array.sharding.device_set) == 1
    return borrow(array) if is_on_one else np.asarray(array)


@dataclass(frozen=True)
class PartOfArray:
    """The part of a sharded array that this instance holds.

    Attributes:
        local: The part.
        whole: Shape and dtype of the array.
        shards: Division of the array.
        replicas: Replicas of the job, which connect the instances.
    """

    local: jax.Array | np.ndarray
    whole: jax.ShapeDtypeStruct | trees.ShapeOfArray
    shards: Shards
    replicas: Replicas

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        shape: tuple[int, ...] = self.whole.shape
        return shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        dtype: np.dtype = np.dtype(self.whole.dtype)
        return dtype

    def gather(self, name: str) -> np.ndarray:
        """Return the whole array. Collective.

        Args:
            name: Name of the array for messages.
        """
        own: np.ndarray = on_host(self.local).reshape(-1)
        size = self.shards.local * self.shards.part(self.whole)
        own = own[:size] if own.size >= size else np.pad(own, (0, size - own.size))
        parts = self.replicas.communicator.all_gather(np.ascontiguousarray(own), name=f"parts of {name}")
        whole: np.ndarray = self.shards.join(parts, self.whole, np)
        return whole

    def of(self, array: Leaf) -> Tree:
        """Return this instance's part of another array of the same shape, placed like this one."""
        starts, flat = self.replicas.holding.starts[: self.shards.blocks], np.asarray(array).reshape(-1)
        blocks = [self.shards.padded(flat[self.shards.bounds(array, start)], array) for start in starts]
        part = np.concatenate(blocks)[: self.local.size].reshape(self.local.shape)
        if isinstance(self.local, np.ndarray):
            return part
        placed: jax.Array = jax.device_put(part, getattr(self.local, "sharding", None))
        return placed


@dataclass(frozen=True)
class ShardedTree:
    """The division of a tree of arrays, some of which are cut into shards.

    Attributes:
        replicas: Replicas of the job, which connect the instances.
        shards: Division of arrays.
        shapes: Shapes and dtypes of all arrays, whole.
        is_cut: Whether each array is cut, as a tree of the same structure.
    """

    replicas: Replicas
    shards: Shards
    shapes: Tree
    is_cut: Tree

    def take(self, tree: Tree, first: jax.Array) -> Tree:
        """Return an instance's parts of whole arrays, as `take` does; traceable."""
        return trees.map(lambda leaf, is_cut: take(self.shards, leaf, first) if is_cut else leaf, tree, self.is_cut)

    def cut_anew(self, tree: Tree, rows: Rows, had: Holding) -> Tree:
        """Return this instance's parts, and copies, of arrays that are cut for an earlier spread. Collective.

        Args:
            tree: Parts for that spread.
            rows: Source of parts.
            had: Holding of this instance in that spread.
        """
        numbers = itertools.count()

        def cut(leaf: Leaf, shape: Leaf, is_cut: bool) -> Leaf:
            number = next(numbers)
            return self._cut_anew(leaf, shape, rows, had, f"optimizer state/{number}") if is_cut else leaf

        return trees.map(cut, tree, self.shapes, self.is_cut)

    def _cut_anew(self, leaf: Leaf, whole: Leaf, rows: Rows, had: Holding, name: str) -> jax.Array:
        shards, holding, dtype = self.shards, self.replicas.holding, np.dtype(whole.dtype)
        width = shards.part(whole) * dtype.itemsize
        placed = np.zeros((shards.blocks, shards.local, width), np.uint8)
        blocks = [holding.own, holding.kept][: shards.blocks]
        for block, found in zip(placed, rows.fetch(blocks, replica_rows(leaf, had), width, name), strict=True):
            block[: len(found)] = found
        cut: jax.Array = jnp.array(placed.reshape(-1).view(dtype).reshape(shards.shape(whole)))
        return cut

    def whole(self, tree: Tree) -> Tree:
        """Return the tree with a `PartOfArray` for each array that this instance holds only in part."""
        return trees.map(
            lambda leaf, shape, is_cut: PartOfArray(leaf, shape, self.shards, self.replicas) if is_cut else leaf,
            tree,
            self.shapes,
            self.is_cut,
        )


def rows_of_replicas(replicas: Replicas) -> Callable[[Leaf], PartOfArray]:
    """Return a function that makes a `PartOfArray` of an array with the same number of rows for each local replica."""
    shards = shards_of(replicas, 1)

    def of_all(leaf: Leaf) -> PartOfArray:
        rows = leaf.shape[0] // len(replicas.local_replicas) * shards.replicas
        return PartOfArray(leaf, jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), shards, replicas)

    return of_all
