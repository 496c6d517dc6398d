"""Arrays of which every replica has a part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from strategies.replicas.devices import borrow
from strategies.replicas.replicas import Replicas
from strategies.typing import Leaf, Tree


@dataclass(frozen=True)
class Shards:
    """The division of arrays into shards, one for each replica; an instance has the shards of its replicas.

    A part has the same number of elements on every replica, the last ones are padded with zeros. It keeps as many
    axes as the array, all but the first of length 1, so that optimizers which ask for the number of axes see it.

    Attributes:
        replicas: R.
        local: how many of them this instance drives.
        min_elements: arrays with fewer elements, and scalars, stay whole.
    """

    replicas: int
    local: int
    min_elements: int

    def divides(self, leaf: Leaf) -> bool:
        """Return whether an array of that shape is cut."""
        return bool(leaf.shape) and math.prod(leaf.shape) >= self.min_elements

    def part(self, leaf: Leaf) -> int:
        """Return the number of elements that each replica has."""
        size: int = math.prod(leaf.shape)
        return -(-size // self.replicas)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape of an instance's part of an array."""
        return (self.local * self.part(leaf), *[1] * (len(leaf.shape) - 1)) if self.divides(leaf) else leaf.shape

    def take(self, leaf: jax.Array, first: jax.Array) -> jax.Array:
        """Return the part of an array that the instance whose first replica is `first` has; traceable."""
        if not self.divides(leaf):
            return leaf
        flat, part = leaf.reshape(-1), self.part(leaf)
        if self.replicas * part > flat.size:
            flat = jnp.pad(flat, (0, self.replicas * part - flat.size))
        return jax.lax.dynamic_slice(flat, (first * part,), (self.local * part,)).reshape(self.shape(leaf))

    def take_on_host(self, array: np.ndarray, first: int) -> np.ndarray:
        """`take` of an array of NumPy, as a copy."""
        part = self.part(array)
        taken = np.zeros(self.local * part, array.dtype)
        rest = array.reshape(-1)[first * part : (first + self.local) * part]
        taken[: rest.size] = rest
        return taken

    def join(self, parts: Tree, leaf: Leaf) -> Tree:
        """Return the array, of the shape of `leaf`, whose parts on all instances lie one after another."""
        return parts.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)


@dataclass(frozen=True)
class PartOfArray:
    """The part that this instance has of an array that is cut into shards.

    Attributes:
        local: its part.
        whole: the shape and dtype of the array.
        shards: how it is cut.
        replicas: connects the instances.
    """

    local: jax.Array | np.ndarray
    whole: jax.ShapeDtypeStruct
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
        """Return the array; a collective call.

        Args:
            name: for messages.
        """
        is_on_one = isinstance(self.local, jax.Array) and len(self.local.sharding.device_set) == 1
        local = borrow(self.local) if is_on_one else np.asarray(self.local)
        parts = self.replicas.communicator.all_gather(np.ascontiguousarray(local), name=f"parts of {name}")
        whole: np.ndarray = self.shards.join(parts, self.whole)
        return whole

    def of(self, array: Leaf) -> Tree:
        """Return this instance's part of another array of the same shape, placed like this one."""
        if isinstance(self.local, np.ndarray):
            return self.shards.take_on_host(np.asarray(array), self.replicas.local_replicas.start)
        first = np.int32(self.replicas.local_replicas.start)
        part = jax.jit(self.shards.take)(array, first).reshape(self.local.shape)
        placed: jax.Array = jax.device_put(part, getattr(self.local, "sharding", None))
        return placed
