"""Traffic: waves of messages, each as columns of numbers; those of a plan, of the chain, and of a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.plans.choice import Width
from collectives.plans.comparing import Relay
from collectives.plans.plan import Plan, Round


@dataclass(frozen=True)
class Wave:
    """Messages that ranks send when they have all that the wave before has brought them.

    Attributes:
        source: the rank that sends each message.
        to: the rank that receives it.
        nbytes: its size.
        added: for each rank the bytes that it reads for its sums before it sends; None: nobody adds.
        times: how many such waves follow each other.
    """

    source: np.ndarray
    to: np.ndarray
    nbytes: np.ndarray
    added: np.ndarray | None = None
    times: int = 1


@dataclass(frozen=True)
class Traffic:
    """A reduction.

    Attributes:
        name: what it is called in tables.
        hosts: for each rank the number of its host.
        pieces: how many times the waves are gone through, one piece close behind the other.
        waves: of one piece; called for each time that they are needed.
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
    """Return what a plan sends.

    Args:
        plan: of one piece.
        elements: of the whole array.
        width: of its elements.
        pieces: into how many it is cut.
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
    """Return what ranks tell each other before data move.

    Args:
        hosts: the host of each rank.
        rounds: who tells whom what whom has said.
        block_bytes: what one rank says.
    """
    made = []
    for each in rounds:
        columns = np.array([(message.source, message.to, len(message.ranks)) for message in each])
        source, to, ranks = columns.T
        made.append(Wave(source, to, ranks * float(block_bytes)))
    return Traffic("comparison", hosts, 1, lambda: made)


def ring(hosts: np.ndarray, nbytes: float) -> Traffic:
    """Return the traffic of the ring of Patarasuk and Yuan (2009): 2 (n - 1) steps with 1 / n of the array."""
    ranks = hosts.size
    here = np.arange(ranks)
    part = np.full(ranks, nbytes / ranks)
    adding = Wave(here, (here + 1) % ranks, part, 2 * part, ranks - 1)
    copying = Wave(here, (here + 1) % ranks, part, None, ranks - 1)
    return Traffic("ring", hosts, 1, lambda: [adding, copying] if ranks > 1 else [])


def chain(hosts: np.ndarray, nbytes: float, chunk_bytes: float) -> Traffic:
    """((g0 + g1) + g2) + ...: partial sums go from the first rank to the last, in chunks, and results once round."""
    ranks = hosts.size
    chunks = max(1, round(nbytes / chunk_bytes))
    hops = 2 * (ranks - 1)
    places = np.arange(hops)
    source = np.where(places < ranks, places, places - ranks) % ranks

    def waves() -> Iterator[Wave]:
        """Chunk c makes its hop h in wave c + h."""
        for number in range(chunks + hops - 1):
            under_way = slice(max(0, number - chunks + 1), min(hops, number + 1))
            senders = source[under_way]
            size = np.full(senders.size, nbytes / chunks)
            added = np.zeros(ranks)
            adding = places[under_way] < ranks - 1
            added[(senders[adding] + 1) % ranks] += 2 * size[adding]
            yield Wave(senders, (senders + 1) % ranks, size, added)

    return Traffic("chain", hosts, 1, waves if ranks > 1 else lambda: [])
