"""The first messages of a reduction between hosts, which travel with the comparison of calls.

What others send is kept apart until all ranks are known to call the same: only then it is added to anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from collectives.plans.plan import Plan
from collectives.point_to_point.link import PARTIALS, Fetch, Link, Transfer
from collectives.tree import root_of


def opening_round(plan: Plan) -> int:
    """Return the first round in which messages leave hosts; -1 where there is none, or it has results."""
    hosts, root = plan.spread.hosts, root_of(plan.spread.replicas)
    for number, each in enumerate(plan.rounds):
        leaving = [message for message in each.messages if hosts[message.source] != hosts[message.to]]
        if leaving:
            return number if all(message.node != root for message in leaving) else -1
    return -1


class _Gone:
    """A message that needs no waiting for."""

    received = None

    def done(self) -> bool:
        return True


class _Delivered:
    """A partial sum that comes with the comparison."""

    received = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.message: np.ndarray = np.empty(0, np.uint8)
        self.has_come = False

    def done(self) -> bool:
        return self.has_come


class OpeningLink(Link):
    """A link of which partial sums to some ranks are held back, and those of some are delivered by hand.

    Args:
        link: for everything else.
        away: the ranks of other hosts.
    """

    def __init__(self, link: Link, away: frozenset[int]) -> None:
        self.rank = link.rank
        self.size = link.size
        self._link = link
        self._away = away
        self._held: dict[int, list[np.ndarray]] = {}
        self._awaited: dict[int, deque[_Delivered]] = {}

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        """As `Link.send`, but for what is held back; that must not change until `held_for` is asked."""
        if lane != PARTIALS or to not in self._away:
            return self._link.send(data, to, lane)
        self._held.setdefault(to, []).append(data)
        return _Gone()

    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        """As `Link.send_all`: results are not held back."""
        return self._link.send_all(data, to, lane)

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        """As `Link.receive`: results come as always."""
        return self._link.receive(into, source, lane)

    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        """As `Link.fetch`, but for what is delivered."""
        if lane != PARTIALS or source not in self._away:
            return self._link.fetch(room, source, lane)
        awaited = _Delivered(room.size)
        self._awaited.setdefault(source, deque()).append(awaited)
        return awaited

    def held_for(self, rank: int) -> list[np.ndarray]:
        """Return what is to be delivered to a rank."""
        return self._held.get(rank, [])

    def nbytes_from(self, rank: int) -> int:
        """Return how many bytes a rank is to deliver."""
        return sum(each.nbytes for each in self._awaited.get(rank, ()))

    def deliver(self, source: int, payload: np.ndarray) -> None:
        """Let a rank's partial sums come: `nbytes_from` of it."""
        start = 0
        for each in self._awaited.get(source, ()):
            each.message = payload[start : start + each.nbytes]
            start += each.nbytes
            each.has_come = True
