"""Parts of the state that only one instance would have: a neighbour keeps a copy, and after a loss all are cut anew.

The state is seen as one row of bytes for each replica. An instance owns the rows of its replicas, and keeps copies of
the rows of one other instance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from popdist.instance import replica_blocks
from strategies.errors import LostPartError
from strategies.typing import Leaf

_WAY_OUT = "; start the job again from its last checkpoint, or use poprun --on-failure restart, which does so"
Find = Callable[[range], np.ndarray]
"""A function that returns this instance's rows of some replicas, uint8 of shape `(len(replicas), width)`."""


@dataclass(frozen=True)
class Holding:
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
    def of(cls, rank: int, hosts: Sequence[int], replicas: int, spread: int) -> Holding:
        """Return the holding of an instance that keeps copies for another one, if there is another one.

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
class Held:
    """What an instance has of a state besides the arrays that all instances have.

    Attributes:
        holding: Replicas of whose sharded arrays, and own arrays, it has the rows.
        own: Arrays with rows of its own replicas, which no step makes on other instances.
        copies: Rows of all of these arrays for the replicas of another instance, uint8 of shape
            `(replicas, bytes of a replica)`.
    """

    holding: Holding
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
            if replicas.start in self.holding.own:
                return rows[_within(replicas, self.holding.own)]
            return self.copies[_within(replicas, self.holding.kept), start : start + rows.shape[1]]

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


class Rows:
    """The rows of all replicas, wherever they are, after the spread has changed. Making one is a collective call.

    Args:
        communicator: Communicator of the instances.
        replicas: R.
        had: Holding of this instance before; None if it had nothing.
        step: Number of steps that its rows have made.

    Raises:
        LostPartError: On all instances, if no instance has the rows of a replica, or rows are of different steps.
    """

    def __init__(self, communicator: Communicator, replicas: int, had: Holding | None, step: int) -> None:
        self._communicator = communicator
        facts = np.full(5, -1, np.int64)
        if had is not None:
            facts[...] = had.own.start, had.own.stop, had.kept.start, had.kept.stop, step
        gathered = communicator.all_gather(facts, name="replicas whose parts the instances have").tolist()
        steps = sorted({row[4] for row in gathered if row[4] >= 0})
        if len(steps) > 1:
            raise LostPartError(f"the instances have parts of the states of steps {steps}, which differ{_WAY_OUT}")
        self._sources = _sources(gathered, replicas)

    def fetch(self, wanted: Sequence[range], find: Find, width: int, name: str) -> list[np.ndarray]:
        """Return the rows of some replicas, uint8 of shape `(len(replicas), width)` for each range. Collective.

        Args:
            wanted: Ranges of replicas; instances may want different ones.
            find: Function that finds the rows of replicas that this instance had.
            width: Number of bytes of a row.
            name: Name of the array for messages.
        """
        found = [np.zeros((len(replicas), width), np.uint8) for replicas in wanted]
        for rank, replicas in self._sources:
            rows = find(replicas) if rank == self._communicator.rank else np.empty((len(replicas), width), np.uint8)
            rows = np.ascontiguousarray(rows)
            self._communicator.broadcast(rows, rank, name=f"part of {name}")
            for each, into in zip(wanted, found, strict=True):
                common = range(max(each.start, replicas.start), min(each.stop, replicas.stop))
                if common:
                    into[_within(common, each)] = rows[_within(common, replicas)]
        return found


def bytes_of(array: np.ndarray, count: int) -> np.ndarray:
    """Return an array as `count` rows of bytes, without a copy if it is contiguous."""
    rows: np.ndarray = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(count, -1)
    return rows


def _within(replicas: range, all_of: range) -> slice:
    return slice(replicas.start - all_of.start, replicas.stop - all_of.start)


def _sources(facts: Sequence[Sequence[int]], replicas: int) -> list[tuple[int, range]]:
    """Return ranges of replicas in order, each with a rank that has its rows: if possible one that drives them."""
    owned = [range(row[0], row[1]) for row in facts]
    kept = [range(row[2], row[3]) for row in facts]
    sources: list[tuple[int, range]] = []
    lost: list[int] = []
    replica = 0
    while replica < replicas:
        found = [(rank, each) for each_of in (owned, kept) for rank, each in enumerate(each_of) if replica in each]
        if not found:
            lost.append(replica)
            replica += 1
            continue
        rank, each = found[0]
        stop = each.stop if each is owned[rank] else _first_owned(owned, replica, each.stop)
        sources.append((rank, range(replica, stop)))
        replica = stop
    if lost:
        raise LostPartError(
            f"the parts of the state of replicas {', '.join(map(str, lost))} are lost: the instance that drove them, "
            f"and the one that kept a copy, were lost before the others had copied the parts again{_WAY_OUT}"
        )
    return sources


def _first_owned(owned: Sequence[range], begin: int, end: int) -> int:
    """Return the first replica after `begin` that an instance drives, at most `end`."""
    return next((replica for replica in range(begin, end) if any(replica in each for each in owned)), end)
