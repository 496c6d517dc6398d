"""The first messages of a reduction between hosts, which travel with the comparison of calls.

Received partial sums are not used until all ranks are known to make the same call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from collectives.plans.plan import Plan
from collectives.point_to_point.link import PARTIALS, Fetch, Link, Transfer
from collectives.tree import root_of


def opening_round(plan: Plan) -> int:
    """Return the first round with messages that leave hosts; -1 if there is none or its messages are results."""
    hosts, root = plan.spread.hosts, root_of(plan.spread.replicas)
    for number, each in enumerate(plan.rounds):
        leaving = [message for message in each.messages if hosts[message.source] != hosts[message.to]]
        if leaving:
            return number if all(message.node != root for message in leaving) else -1
    return -1


class _Gone:
    """A transfer that is done from the beginning."""

    received = None

    def done(self) -> bool:
        return True


class _Delivered:
    """A partial sum that arrives with the comparison of calls."""

    received = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.message: np.ndarray = np.empty(0, np.uint8)
        self.has_come = False

    def done(self) -> bool:
        return self.has_come


class OpeningLink(Link):
    """A link that holds back partial sums to some ranks, and receives partial sums from them by `deliver`.

    Args:
        link: Link for all other messages.
        away: Ranks of other hosts.
    """

    def __init__(self, link: Link, away: frozenset[int]) -> None:
        self.rank = link.rank
        self.size = link.size
        self._link = link
        self._away = away
        self._held: dict[int, list[np.ndarray]] = {}
        self._awaited: dict[int, deque[_Delivered]] = {}

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        """Send as `Link.send`, or hold a partial sum back; held data must not change before `held_for` is called."""
        if lane != PARTIALS or to not in self._away:
            return self._link.send(data, to, lane)
        self._held.setdefault(to, []).append(data)
        return _Gone()

    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        """Send as `Link.send_all`: results are not held back."""
        return self._link.send_all(data, to, lane)

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        """Receive as `Link.receive`: results travel as usual."""
        return self._link.receive(into, source, lane)

    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        """Receive as `Link.fetch`, or await a partial sum from `deliver`."""
        if lane != PARTIALS or source not in self._away:
            return self._link.fetch(room, source, lane)
        awaited = _Delivered(room.size)
        self._awaited.setdefault(source, deque()).append(awaited)
        return awaited

    def held_for(self, rank: int) -> list[np.ndarray]:
        """Return the held partial sums for a rank."""
        return self._held.get(rank, [])

    def nbytes_from(self, rank: int) -> int:
        """Return the number of bytes that a rank has to deliver."""
        return sum(each.nbytes for each in self._awaited.get(rank, ()))

    def deliver(self, source: int, payload: np.ndarray) -> None:
        """Hand over a rank's partial sums: the first `nbytes_from(source)` bytes of `payload`."""
        start = 0
        for each in self._awaited.get(source, ()):
            each.message = payload[start : start + each.nbytes]
            start += each.nbytes
            each.has_come = True
