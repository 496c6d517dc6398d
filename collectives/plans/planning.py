"""Makes reduction plans: columns of ranks add between hosts, after each host has added what it owns.

An array is cut into columns, and in each column one rank works for each host. First it gets what the other ranks of its
host own of the column; then the ranks of the column add between hosts, in one of several ways; at last each gives the
results to the ranks of its host. So a host's link carries what one rank would send, however many ranks sit behind it.
Where there is one host, nothing is left between hosts; where each rank has a host to itself, nothing is left inside.
With one column the first rank of each host works for all of it, and hosts exchange as few messages as they can.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest

from collectives.plans.between_hosts import WAYS, inside, pairs_up
from collectives.plans.plan import Addition, Message, Plan, Round
from collectives.plans.spread import Spread
from collectives.tree import TreeNode, root_of

_CACHED = 256


@lru_cache(_CACHED)
def plan_for(spread: Spread, way: str, columns: int = 0) -> Plan:
    """Return the plan of a reduction.

    Args:
        spread: who owns which replicas, on which host.
        way: one of `possible_ways`.
        columns: into how many the array is cut; default: as many as the largest host has ranks.
    """
    columns = columns or max(map(len, spread.ranks_of))
    owners: list[int] = []
    rounds: list[Round] = []
    for column in range(columns):
        workers = tuple(ranks[column * len(ranks) // columns] for ranks in spread.ranks_of)
        of_column, between = WAYS[way](_held(spread, workers), spread.replicas)
        first, stop = len(owners), len(owners) + len(of_column)
        owners += [workers[host] if host >= 0 else -1 for host in of_column]
        moved = [_moved(each, workers, first) for each in between]
        within = [_gathering(spread, workers, first, stop), *moved, _spreading(spread, workers, first, stop)]
        rounds = [_joined(one, other) for one, other in zip_longest(rounds, within, fillvalue=Round((), ()))]
    rounds = [each for each in rounds if each.additions or each.messages]
    return Plan(way, spread, tuple(owners), tuple(rounds))


def possible_ways(spread: Spread) -> tuple[str, ...]:
    """Return the names of the ways that there are for a spread."""
    workers = tuple(ranks[0] for ranks in spread.ranks_of)
    if len(workers) > 1 and pairs_up(_held(spread, workers), spread.replicas):
        return tuple(WAYS)
    return ("direct",)


def _held(spread: Spread, workers: tuple[int, ...]) -> list[tuple[TreeNode, ...]]:
    """Return what each worker begins with: its own contributions, and the sums of the others of its host."""
    held = []
    for ranks, worker in zip(spread.ranks_of, workers, strict=True):
        nodes = [*spread.leaves(worker), *(node for rank in ranks if rank != worker for node in spread.sums[rank])]
        held.append(tuple(sorted(nodes)))
    return held


def _gathering(spread: Spread, workers: tuple[int, ...], first: int, stop: int) -> Round:
    """Return the round in which the other ranks of each host add up what they own of the column, and send it."""
    additions, messages = [], []
    for ranks, worker in zip(spread.ranks_of, workers, strict=True):
        for rank in ranks:
            for node in spread.sums[rank] if rank != worker else ():
                if not node.is_leaf:
                    additions.append(Addition(rank, first, stop, inside(spread.leaves(rank), node), node))
                messages.append(Message(rank, worker, first, stop, node))
    return Round(tuple(additions), tuple(messages))


def _spreading(spread: Spread, workers: tuple[int, ...], first: int, stop: int) -> Round:
    """Each worker gives the results of the column to the other ranks of its host."""
    root = root_of(spread.replicas)
    messages = [
        Message(worker, rank, first, stop, root)
        for ranks, worker in zip(spread.ranks_of, workers, strict=True)
        for rank in ranks
        if rank != worker
    ]
    return Round((), tuple(messages))


def _moved(each: Round, workers: tuple[int, ...], start: int) -> Round:
    """Return a round of a column with its ranks instead of hosts, and its slices behind those of other columns."""
    additions = [
        Addition(workers[host], start + first, start + stop, nodes, into)
        for host, first, stop, nodes, into in each.additions
    ]
    messages = [
        Message(workers[source], workers[to], start + first, start + stop, node)
        for source, to, first, stop, node in each.messages
    ]
    return Round(tuple(additions), tuple(messages))


def _joined(one: Round, other: Round) -> Round:
    return Round(one.additions + other.additions, one.messages + other.messages)
