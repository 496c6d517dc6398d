"""Arrays cut into shards, one for each replica, and the parts of all instances in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from collectives import Communicator
from collectives.arrays import aligned_empty
from popdist.instance import replica_blocks
from strategies.exchange.flat import FlatLayout
from strategies.typing import Leaf


@dataclass(frozen=True)
class Shards:
    """The division of arrays into shards, one for each replica; an instance holds the shards of its replicas.

    All shards have the same number of elements; the last ones are padded with zeros. A part keeps the array's number of
    axes, all but the first of length 1, because some optimizers depend on the number of axes.

    Attributes:
        replicas: R.
        local: Number of replicas in a block: the most that an instance drives. If it drives fewer, a shard of a replica
            of others, or padding, fills its block.
        min_elements: Least number of elements of an array that is cut; smaller arrays and scalars stay whole.
        blocks: Number of blocks of each instance: its own, and perhaps a copy of another instance's.
        is_even: Whether all instances drive equally many replicas.
    """

    replicas: int
    local: int
    min_elements: int
    blocks: int = 1
    is_even: bool = True

    def divides(self, leaf: Leaf) -> bool:
        """Return whether an array of this shape is cut."""
        return bool(leaf.shape) and math.prod(leaf.shape) >= self.min_elements

    def part(self, leaf: Leaf) -> int:
        """Return the number of elements of each replica's shard."""
        size: int = math.prod(leaf.shape)
        return -(-size // self.replicas)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape of an instance's part of an array."""
        if not self.divides(leaf):
            return tuple(leaf.shape)
        return (self.blocks * self.local * self.part(leaf), *[1] * (len(leaf.shape) - 1))

    def sizes(self, leaves: Sequence[Leaf]) -> dict[int, int]:
        """Return the size of this instance's own part, in elements, for each array that is cut, by its number."""
        return {number: self.local * self.part(leaf) for number, leaf in enumerate(leaves) if self.divides(leaf)}

    def bounds(self, leaf: Leaf, first: int) -> slice:
        """Return the elements of the instance whose first replica is `first`, without padding."""
        size, part = math.prod(leaf.shape), self.part(leaf)
        return slice(min(size, first * part), min(size, (first + self.local) * part))

    def padded(self, elements: np.ndarray, leaf: Leaf) -> np.ndarray:
        """Return a copy of an instance's elements of an array like `leaf`, padded with zeros."""
        part = np.zeros(self.local * self.part(leaf), elements.dtype)
        part[: elements.size] = elements
        return part

    def join(self, parts: Leaf, leaf: Leaf, library: ModuleType) -> Leaf:
        """Return the array of the shape of `leaf` from the own parts of all instances.

        Args:
            parts: One row for each instance.
            leaf: Array, or its shape.
            library: NumPy, or JAX while it traces.
        """
        flat = parts.reshape(-1)
        if not self.is_even:
            blocks, part = replica_blocks(len(parts), self.replicas), self.part(leaf)
            flat = library.concatenate([row[: len(block) * part] for row, block in zip(parts, blocks, strict=True)])
        return flat[: math.prod(leaf.shape)].reshape(leaf.shape)


class ShardedArrays:
    """Parts of cut arrays on this instance, in flat buffers that can be gathered from all instances.

    Args:
        shards: Division of arrays.
        arrays: Shapes and dtypes of all arrays, whole.
        name: Name of the collectives.

    Attributes:
        cut: Numbers of the arrays that are cut.
        uncut: Numbers of the other arrays.
        layout: Places of this instance's parts of the cut arrays, in their order.
    """

    def __init__(self, shards: Shards, arrays: Sequence[Leaf], name: str) -> None:
        sizes = shards.sizes(arrays)
        self.cut = list(sizes)
        self.uncut = [number for number in range(len(arrays)) if number not in sizes]
        dtypes = tuple(np.dtype(arrays[number].dtype) for number in self.cut)
        self.layout = FlatLayout(tuple((size,) for size in sizes.values()), dtypes, tail=0)
        self._name = name
        self._room = np.empty(0, np.uint8)

    @property
    def members(self) -> dict[int, list[int]]:
        """The numbers of the arrays whose parts lie in each non-empty buffer, by the number of the buffer."""
        buffers = enumerate(self.layout.buffers)
        return {number: [self.cut[leaf] for leaf in buffer.leaves] for number, buffer in buffers if buffer.size}

    def gather(self, number: int, own: np.ndarray, communicator: Communicator) -> np.ndarray:
        """Return the parts of all instances in a buffer, one row for each instance. Collective.

        Args:
            number: Number of the buffer.
            own: This instance's parts, placed by the layout.
            communicator: Communicator of the instances.

        Returns:
            Memory from which XLA reads in place. The next call, for any buffer, overwrites it.
        """
        nbytes = communicator.size * own.nbytes
        if self._room.size < nbytes:
            self._room = aligned_empty(nbytes)
        gathered: np.ndarray = self._room[:nbytes].view(own.dtype).reshape(communicator.size, own.size)
        communicator.all_gather(own, gathered, name=f"{self._name}/{number}")
        return gathered
