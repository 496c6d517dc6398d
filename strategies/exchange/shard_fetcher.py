"""Parts of the state that only one instance would have: a neighbour keeps a copy, and after a loss all are cut anew.

The state is seen as one row of bytes for each replica. An instance owns the rows of its replicas, and keeps copies of
the rows of one other instance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives import Communicator
from strategies.errors import LostPartError
from strategies.stored_shards import Find, StoredReplicas, within

_WAY_OUT = "; start the job again from its last checkpoint, or use poprun --on-failure restart, which does so"


class ShardFetcher:
    """A fetcher of replicas' rows from the instances that store them, after the spread has changed. Collective.

    Args:
        communicator: Communicator of the instances.
        replicas: R.
        had: Stored replicas of this instance before; None if it had nothing.
        step: Number of steps that its rows have made.

    Raises:
        LostPartError: On all instances, if no instance has the rows of a replica, or rows are of different steps.
    """

    def __init__(self, communicator: Communicator, replicas: int, had: StoredReplicas | None, step: int) -> None:
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
                    into[within(common, each)] = rows[within(common, replicas)]
        return found


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
