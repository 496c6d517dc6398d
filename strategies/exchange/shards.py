"""Arrays that are cut into shards, one for each replica, and the parts of all instances in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from collectives.arrays import aligned_empty
from strategies.exchange.flat import FlatLayout
from strategies.typing import Leaf


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

    def sizes(self, leaves: Sequence[Leaf]) -> dict[int, int]:
        """Return the number of elements in an instance's parts, by the numbers of the arrays that are cut."""
        return {number: self.local * self.part(leaf) for number, leaf in enumerate(leaves) if self.divides(leaf)}

    def bounds(self, leaf: Leaf, first: int) -> slice:
        """Return the elements that the instance whose first replica is `first` has, without padding."""
        size, part = math.prod(leaf.shape), self.part(leaf)
        return slice(min(size, first * part), min(size, (first + self.local) * part))

    def padded(self, elements: np.ndarray, leaf: Leaf) -> np.ndarray:
        """Return a copy of an instance's elements of an array like `leaf`, with the padding behind them."""
        part = np.zeros(self.local * self.part(leaf), elements.dtype)
        part[: elements.size] = elements
        return part

    def join(self, parts: Leaf, leaf: Leaf) -> Leaf:
        """Return the array, of the shape of `leaf`, whose parts on all instances lie one after another."""
        return parts.reshape(-1)[: math.prod(leaf.shape)].reshape(leaf.shape)


class ShardedArrays:
    """Arrays of which this instance has parts, in flat buffers that are gathered from all instances.

    Args:
        shards: the way in which arrays are cut.
        arrays: the shapes and dtypes of all arrays, whole.
        name: of the collectives.

    Attributes:
        cut: the numbers of the arrays that are cut.
        uncut: the numbers of the others.
        layout: of this instance's parts of the arrays that are cut, in their order.
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
        """For each buffer that is not empty, by its number, the numbers of the arrays whose parts lie there."""
        buffers = enumerate(self.layout.buffers)
        return {number: [self.cut[leaf] for leaf in buffer.leaves] for number, buffer in buffers if buffer.size}

    def gather(self, number: int, own: np.ndarray, communicator: Communicator) -> np.ndarray:
        """Return the parts of all instances in a buffer, one row for each instance; a collective call.

        Args:
            number: of the buffer.
            own: this instance's parts, as the layout has them.
            communicator: connects the instances.

        Returns:
            Memory from which XLA reads in place. The next call, for whichever buffer, overwrites it.
        """
        nbytes = communicator.size * own.nbytes
        if self._room.size < nbytes:
            self._room = aligned_empty(nbytes)
        gathered: np.ndarray = self._room[:nbytes].view(own.dtype).reshape(communicator.size, own.size)
        communicator.all_gather(own, gathered, name=f"{self._name}/{number}")
        return gathered
