"""The link of ranks on several hosts: what stays on a host goes through its memory, all else over the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from collectives.hosts.near import NearLink
from collectives.point_to_point.link import Fetch, Link, Pause, Transfer

_MOST_HELD = 256
"""Transfers over the network of which nobody has asked whether they are done."""

Some = TypeVar("Some", bound=Transfer)


class HostsLink(Link):
    """A link to all ranks that takes the shorter way to those of this rank's host.

    Args:
        far: to all ranks.
        near: to those of this host, in their order.
    """

    def __init__(self, far: Link, near: NearLink) -> None:
        self.rank = far.rank
        self.size = far.size
        self.hosts = self.nearby = far.hosts
        self.sizes = far.sizes
        self.costs, self.are_costs_measured = far.costs, far.are_costs_measured
        self._far = far
        self._near = near
        self._under_way: deque[Transfer] = deque()  # over the network
        self._number = {rank: number for number, rank in enumerate(ranks_beside(far))}

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        if to in self._number:
            return self._near.send(data, self._number[to], lane)
        return self._watched(self._far.send(data, to, lane))

    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        here = [self._number[each] for each in to if each in self._number]
        near = iter(self._near.send_all(data, here, lane) if here else ())
        return [next(near) if each in self._number else self.send(data, each, lane) for each in to]

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        if source in self._number:
            return self._near.receive(into, self._number[source], lane)
        return self._watched(self._far.receive(into, source, lane))

    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        if source in self._number:
            return self._near.fetch(room, self._number[source], lane)
        return self._watched(self._far.fetch(room, source, lane))

    def pausing(self) -> Pause | None:
        """Return a pause until a rank of this host rings; None where the network may end the wait or is polled."""
        return None if self._is_under_way() else self._near.pause

    def _watched(self, transfer: Some) -> Some:
        # Who asks MPI for one that is not done offers its core to others: not between the messages of a round.
        if len(self._under_way) >= _MOST_HELD:
            self._is_under_way()
        self._under_way.append(transfer)
        return transfer

    def _is_under_way(self) -> bool:
        """Return whether anything is, over the network; what is done is forgotten."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        return bool(self._under_way)

    def close(self) -> None:
        self._far.close()


def ranks_beside(link: Link) -> list[int]:
    """Return the ranks of this rank's host, with this one."""
    return [rank for rank, host in enumerate(link.hosts) if host == link.hosts[link.rank]]
