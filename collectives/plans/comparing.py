"""The comparison of calls before data move: at the end every rank knows what each of the others calls.

First the ranks of a host tell each other. Then one rank of each host tells one of each other host what all of its ranks
have said: in one round where hosts are few, else in as many as their number has bits (Bruck et al., Efficient
algorithms for all-to-all communications in multiport message-passing systems, 1997). At last these tell the others of
their host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

_CACHED = 64

MOST_AT_ONCE = 8
"""Up to so many hosts tell each other everything in one round: each then sends to seven others at most."""


class Relay(NamedTuple):
    """A message with what some ranks have said.

    Attributes:
        source: who sends it.
        to: who receives it.
        ranks: what whom has said, in the order in which it lies in the message.
    """

    source: int
    to: int
    ranks: tuple[int, ...]


@lru_cache(_CACHED)
def relays(hosts: tuple[int, ...], at_once: int = MOST_AT_ONCE) -> tuple[tuple[Relay, ...], ...]:
    """Return the messages of each round.

    Args:
        hosts: the number of the host of each rank.
        at_once: up to how many hosts tell each other everything in one round.
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
    """Yield each round's sends as (distance, number of hosts whose messages are forwarded)."""
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
