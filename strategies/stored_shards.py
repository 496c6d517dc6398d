"""The replicas whose shards an instance stores: its own, and a neighbour's, as backups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from popdist.instance import replica_blocks
from strategies.typing import Leaf

Find = Callable[[range], np.ndarray]
"""A function that returns this instance's rows of some replicas, uint8 of shape `(len(replicas), width)`."""


@dataclass(frozen=True)
class StoredReplicas:
    """The replicas whose rows an instance has.

    Attributes:
        own: Replicas that it drives.
        kept: Replicas of another instance, of whose rows it has copies; empty without copies.
        slots: The largest number of replicas that an instance drives.
        spread: Number of the spread of replicas over instances; every loss, and every instance that joins, begins a new
            one.
        distance: How many ranks further the instance is whose rows are copied; 0 without copies.
    """

    own: range
    kept: range
    slots: int
    spread: int
    distance: int = 0

    @classmethod
    def of(cls, rank: int, hosts: Sequence[int], replicas: int, spread: int) -> StoredReplicas:
        """Return the replicas of an instance that also keeps copies for another one, if there is one.

        Args:
            rank: Rank of the instance.
            hosts: Host number of each instance.
            replicas: R.
            spread: Number of the spread.
        """
        blocks = replica_blocks(len(hosts), replicas)
        distance = distance_to_kept(hosts) if len(hosts) > 1 else 0
        kept = blocks[(rank + distance) % len(hosts)] if distance else range(0)
        return cls(blocks[rank], kept, max(map(len, blocks)), spread, distance)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first replica of each block."""
        return (self.own.start, self.kept.start) if self.kept else (self.own.start,)

    def place(self, replica: int) -> int:
        """Return the number of a replica's row, if the rows of each block lie in `slots` places."""
        return replica - self.own.start if replica in self.own else self.slots + replica - self.kept.start


@dataclass(frozen=True, eq=False)
class StoredShards:
    """Shards and per-replica arrays of a state that this instance stores, with copies of its neighbour's.

    Attributes:
        stored: Replicas of whose sharded arrays, and own arrays, it has the rows.
        own: Arrays with rows of its own replicas, which no step makes on other instances.
        copies: Rows of all of these arrays for the replicas of another instance, uint8 of shape
            `(replicas, bytes of a replica)`.
    """

    stored: StoredReplicas
    own: tuple[Leaf, ...]
    copies: np.ndarray

    def is_of(self, own: Sequence[Leaf]) -> bool:
        """Return whether the copies were made together with these arrays."""
        return len(own) == len(self.own) and all(one is other for one, other in zip(own, self.own, strict=True))

    def finder(self, rows: np.ndarray, start: int) -> Find:
        """Return a function that finds rows of an array.

        Args:
            rows: Own rows as bytes, one for each own replica.
            start: First byte of the array in `copies`.
        """

        def find(replicas: range) -> np.ndarray:
            if replicas.start in self.stored.own:
                return rows[within(replicas, self.stored.own)]
            return self.copies[within(replicas, self.stored.kept), start : start + rows.shape[1]]

        return find


def distance_to_kept(hosts: Sequence[int]) -> int:
    """Return how many ranks further the instance is whose rows an instance copies; the same on all instances.

    It is the smallest distance with the fewest pairs on one host.

    Args:
        hosts: Host number of each instance, at least two.
    """
    size = len(hosts)

    def pairs_on_one_host(distance: int) -> int:
        return sum(hosts[rank] == hosts[(rank + distance) % size] for rank in range(size))

    return min(range(1, size), key=pairs_on_one_host)


def bytes_of(array: np.ndarray, count: int) -> np.ndarray:
    """Return an array as `count` rows of bytes, without a copy if it is contiguous."""
    rows: np.ndarray = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(count, -1)
    return rows


def within(replicas: range, all_of: range) -> slice:
    """Return the places of some replicas in a range of replicas that contains them."""
    return slice(replicas.start - all_of.start, replicas.stop - all_of.start)
