"""The link between ranks on several hosts: messages within a host use its memory, all others the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from typing_extensions import override

from collectives.hosts.near import NearLink
from collectives.point_to_point.link import Fetch, Link, Pause, Transfer

_MOST_HELD = 256
"""Number of remembered network transfers after which finished ones are removed."""

Some = TypeVar("Some", bound=Transfer)


class HostsLink(Link):
    """A link to all ranks that uses shared memory for the ranks of this rank's host.

    Args:
        far: Link to all ranks.
        near: Link to the ranks of this host, in their order.
    """

    def __init__(self, far: Link, near: NearLink) -> None:
        self.rank = far.rank
        self.size = far.size
        self.hosts = self.nearby = far.hosts
        self.sizes = far.sizes
        self.costs, self.are_costs_measured = far.costs, far.are_costs_measured
        self._far = far
        self._near = near
        self._under_way: deque[Transfer] = deque()  # transfers over the network
        self._number = {rank: number for number, rank in enumerate(ranks_beside(far))}

    @override
    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        if to in self._number:
            return self._near.send(data, self._number[to], lane)
        return self._watched(self._far.send(data, to, lane))

    @override
    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        here = [self._number[each] for each in to if each in self._number]
        near = iter(self._near.send_all(data, here, lane) if here else ())
        return [next(near) if each in self._number else self.send(data, each, lane) for each in to]

    @override
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        if source in self._number:
            return self._near.receive(into, self._number[source], lane)
        return self._watched(self._far.receive(into, source, lane))

    @override
    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        if source in self._number:
            return self._near.fetch(room, self._number[source], lane)
        return self._watched(self._far.fetch(room, source, lane))

    def pausing(self) -> Pause | None:
        """Return a pause until a rank of this host rings its bell; None while a network transfer is pending."""
        return None if self._is_under_way() else self._near.pause

    def _watched(self, transfer: Some) -> Some:
        # A poll of an unfinished MPI request yields the core, which is wasteful between the messages of a round.
        if len(self._under_way) >= _MOST_HELD:
            self._is_under_way()
        self._under_way.append(transfer)
        return transfer

    def _is_under_way(self) -> bool:
        """Remove finished network transfers; return whether any is left."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        return bool(self._under_way)

    @override
    def close(self) -> None:
        self._far.close()


def ranks_beside(link: Link) -> list[int]:
    """Return the ranks of this rank's host, including this rank."""
    return [rank for rank, host in enumerate(link.hosts) if host == link.hosts[link.rank]]
