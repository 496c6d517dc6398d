"""Parts of arrays that are cut into shards: inside a program, or as leaves of a state, to be gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import strategies.trees as trees
from strategies.exchange.shards import Shards
from strategies.jax.replicas.devices import borrow
from strategies.jax.replicas.replicas import Replicas
from strategies.late_jax import jax, jnp
from strategies.typing import Leaf, Tree


def shards_of(replicas: Replicas, min_elements: int) -> Shards:
    """Return the division of arrays among replicas."""
    return Shards(replicas.num_replicas_in_sync, len(replicas.local_replicas), min_elements)


def take(shards: Shards, leaf: jax.Array, first: jax.Array) -> jax.Array:
    """Return the part of an array for the instance whose first replica is `first`; traceable."""
    if not shards.divides(leaf):
        return leaf
    flat, part = leaf.reshape(-1), shards.part(leaf)
    if shards.replicas * part > flat.size:
        flat = jnp.pad(flat, (0, shards.replicas * part - flat.size))
    return jax.lax.dynamic_slice(flat, (first * part,), (shards.local * part,)).reshape(shards.shape(leaf))


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
        is_on_one = isinstance(self.local, jax.Array) and len(self.local.sharding.device_set) == 1
        local = borrow(self.local) if is_on_one else np.asarray(self.local)
        parts = self.replicas.communicator.all_gather(np.ascontiguousarray(local), name=f"parts of {name}")
        whole: np.ndarray = self.shards.join(parts, self.whole)
        return whole

    def of(self, array: Leaf) -> Tree:
        """Return this instance's part of another array of the same shape, placed like this one."""
        first = self.replicas.local_replicas.start
        if isinstance(self.local, np.ndarray):
            elements = np.asarray(array).reshape(-1)[self.shards.bounds(array, first)]
            return self.shards.padded(elements, array)
        part = jax.jit(take, static_argnums=0)(self.shards, array, np.int32(first)).reshape(self.local.shape)
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
        """Return the parts of whole arrays for the instance whose first replica is `first`; traceable."""
        return trees.map(lambda leaf, is_cut: take(self.shards, leaf, first) if is_cut else leaf, tree, self.is_cut)

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
        rows = leaf.shape[0] // shards.local * shards.replicas
        return PartOfArray(leaf, jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), shards, replicas)

    return of_all
