"""Traffic as waves of messages in columns of numbers: of a plan, of the chain, and of a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.plans.choice import Width
from collectives.plans.comparing import Relay
from collectives.plans.plan import Plan, Round


@dataclass(frozen=True)
class Wave:
    """Messages that ranks send when they have received everything of the wave before.

    Attributes:
        source: Sending rank of each message.
        to: Receiving rank of each message.
        nbytes: Size of each message.
        added: Bytes that each rank reads for its sums before it sends; None: no rank adds.
        times: Number of successive waves like this.
    """

    source: np.ndarray
    to: np.ndarray
    nbytes: np.ndarray
    added: np.ndarray | None = None
    times: int = 1


@dataclass(frozen=True)
class Traffic:
    """The traffic of a reduction.

    Attributes:
        name: Name in tables.
        hosts: Host number of each rank.
        pieces: Number of pieces that pass the waves, one closely after the other.
        waves: Function that returns the waves of one piece; called each time they are needed.
    """

    name: str
    hosts: np.ndarray
    pieces: int
    waves: Callable[[], Iterable[Wave]]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts.size


def of_plan(plan: Plan, elements: int, width: Width, pieces: int = 1) -> Traffic:
    """Return the traffic of a plan.

    Args:
        plan: Plan of one piece.
        elements: Number of elements of the whole array.
        width: Bytes per element.
        pieces: Number of pieces of the array.
    """
    made = [_wave(each, plan, elements / pieces / plan.slices, width) for each in plan.rounds]
    cut = f", {pieces} pieces" if pieces > 1 else ""
    return Traffic(f"tree, {plan.name}{cut}", np.array(plan.spread.hosts), pieces, lambda: made)


def _wave(each: Round, plan: Plan, elements_of_slice: float, width: Width) -> Wave:
    replicas = plan.spread.replicas
    columns = np.array([(source, to, stop - first) for source, to, first, stop, _ in each.messages]).reshape(-1, 3)
    widths = np.array([width.of(message.node, replicas) for message in each.messages])
    added = np.zeros(plan.spread.size)
    for rank, first, stop, nodes, _ in each.additions:
        added[rank] += (stop - first) * elements_of_slice * sum(width.of(node, replicas) for node in nodes)
    source, to, slices = columns.T.astype(int)
    return Wave(source, to, slices * elements_of_slice * widths, added)


def of_comparison(hosts: np.ndarray, rounds: Sequence[Sequence[Relay]], block_bytes: int) -> Traffic:
    """Return the traffic of the comparison of calls.

    Args:
        hosts: Host number of each rank.
        rounds: Messages of each round.
        block_bytes: Size of one rank's call.
    """
    made = []
    for each in rounds:
        columns = np.array([(message.source, message.to, len(message.ranks)) for message in each])
        source, to, ranks = columns.T
        made.append(Wave(source, to, ranks * float(block_bytes)))
    return Traffic("comparison", hosts, 1, lambda: made)


def ring(hosts: np.ndarray, nbytes: float) -> Traffic:
    """Return the traffic of a ring all-reduce (Patarasuk and Yuan, 2009): 2 (n - 1) steps with 1 / n of the array."""
    ranks = hosts.size
    here = np.arange(ranks)
    part = np.full(ranks, nbytes / ranks)
    adding = Wave(here, (here + 1) % ranks, part, 2 * part, ranks - 1)
    copying = Wave(here, (here + 1) % ranks, part, None, ranks - 1)
    return Traffic("ring", hosts, 1, lambda: [adding, copying] if ranks > 1 else [])


def chain(hosts: np.ndarray, nbytes: float, chunk_bytes: float) -> Traffic:
    """Return the traffic of ((g0 + g1) + g2) + ...: chunks of partial sums go along all ranks, results once around."""
    ranks = hosts.size
    chunks = max(1, round(nbytes / chunk_bytes))
    hops = 2 * (ranks - 1)
    places = np.arange(hops)
    source = np.where(places < ranks, places, places - ranks) % ranks

    def waves() -> Iterator[Wave]:
        """Yield the waves; chunk c makes its hop h in wave c + h."""
        for number in range(chunks + hops - 1):
            under_way = slice(max(0, number - chunks + 1), min(hops, number + 1))
            senders = source[under_way]
            size = np.full(senders.size, nbytes / chunks)
            added = np.zeros(ranks)
            adding = places[under_way] < ranks - 1
            added[(senders[adding] + 1) % ranks] += 2 * size[adding]
            yield Wave(senders, (senders + 1) % ranks, size, added)

    return Traffic("chain", hosts, 1, waves if ranks > 1 else lambda: [])
