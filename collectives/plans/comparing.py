"""The comparison of calls before data moves: afterwards every rank knows the calls of all ranks.

First the ranks of a host exchange their calls. Then one rank of each host exchanges whole hosts' calls with the other
hosts. Few hosts do that in one round, more hosts in a logarithmic number of rounds (Bruck et al., Efficient algorithms
for all-to-all communications in multiport message-passing systems, 1997). Finally these ranks inform the others of
their host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

_CACHED = 64

MOST_AT_ONCE = 8
"""Largest number of hosts that exchange calls in one round; each host then sends to at most seven others."""


class Relay(NamedTuple):
    """A message that forwards the calls of some ranks.

    Attributes:
        source: Sending rank.
        to: Receiving rank.
        ranks: Ranks whose calls the message has, in the order of the message.
    """

    source: int
    to: int
    ranks: tuple[int, ...]


@lru_cache(_CACHED)
def relays(hosts: tuple[int, ...], at_once: int = MOST_AT_ONCE) -> tuple[tuple[Relay, ...], ...]:
    """Return the messages of each round.

    Args:
        hosts: Host number of each rank.
        at_once: Largest number of hosts that exchange everything in one round.
    """
    ranks_of = [[rank for rank, of in enumerate(hosts) if of == host] for host in range(max(hosts) + 1)]
    inside = tuple(Relay(one, other, (one,)) for ranks in ranks_of for one in ranks for other in ranks if one != other)
    between = [tuple(_between(ranks_of, distances)) for distances in _distances(len(ranks_of), at_once)]
    news = tuple(
        Relay(first, other, tuple(rank for rank, of in enumerate(hosts) if of != hosts[first]))
        for first, *others in ranks_of
        for other in others
        if len(ranks_of) > 1
    )
    return tuple(each for each in (inside, *between, news) if each)


def _distances(hosts: int, at_once: int) -> Iterator[list[tuple[int, int]]]:
    """Yield each round's sends as (distance, number of hosts whose calls are forwarded)."""
    if hosts <= at_once:
        yield [(distance, 1) for distance in range(1, hosts)]
        return
    known = 1
    while known < hosts:
        yield [(known, min(known, hosts - known))]
        known *= 2


def _between(ranks_of: Sequence[Sequence[int]], distances: Sequence[tuple[int, int]]) -> Iterator[Relay]:
    count = len(ranks_of)
    for host, (first, *_) in enumerate(ranks_of):
        for distance, known in distances:
            said = tuple(rank for before in range(known) for rank in ranks_of[(host - before) % count])
            yield Relay(first, ranks_of[(host + distance) % count][0], said)
