"""The symbolic execution of plans, on expressions in place of numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from collectives.plans.plan import Plan
from collectives.plans.spread import Spread
from collectives.tree import TreeNode, halves, steps

Expression = int | tuple["Expression", "Expression"]


@lru_cache(None)
def canonical(first: int, stop: int) -> Expression:
    """Return the tree as documented: split at the largest power of two smaller than the whole."""
    if stop - first == 1:
        return first
    half = 1
    while 2 * half < stop - first:
        half *= 2
    return canonical(first, first + half), canonical(first + half, stop)


def added(expressions: list[Expression], nodes: tuple[TreeNode, ...]) -> Expression:
    """Return the sum of expressions by the steps of the executors."""
    values = list(expressions)
    for left, right, _ in steps(nodes):
        values.append((values[left], values[right]))
    return values[-1]


Holdings = list[list[dict[TreeNode, Expression]]]  # by rank and slice


def outcome(plan: Plan) -> Holdings:
    """Return the final expressions of every rank for every slice, if each step can run when its turn comes.

    A message of a round uses the values of its sender at that time, and arrives at the end of the round. A rank needs
    only messages of earlier rounds, so ranks that send without waiting for the receiver cannot deadlock.
    """
    ranks = range(plan.spread.size)
    held: Holdings = [
        [{leaf: leaf.first for leaf in plan.spread.leaves(rank)} for _ in range(plan.slices)] for rank in ranks
    ]
    root = TreeNode(0, plan.spread.replicas)
    met: set[tuple[int, int, bool]] = set()
    for each in plan.rounds:
        for rank, first, stop, nodes, into in each.additions:
            assert len(nodes) > 1 or plan.spread.replicas == 1, "an addition of one"
            for number in range(first, stop):
                mine = held[rank][number]
                mine[into] = added([mine.pop(node) for node in nodes], nodes)
        arriving = []
        pairs = set()
        for source, to, first, stop, node in each.messages:
            assert source != to
            pairs.add((source, to, node == root))
            for number in range(first, stop):
                arriving.append((to, number, node, held[source][number][node]))
        for to, number, node, expression in arriving:
            mine = held[to][number]
            overlap = [one for one in mine if one.first < node.stop and node.first < one.stop and node != root]
            assert not overlap, "a value that was there already"
            assert node not in mine, "sent twice"
            mine[node] = expression
        assert not met & pairs, "two ranks exchange messages of one kind in two rounds"
        met |= pairs
    return held


def assert_right(plan: Plan) -> None:
    """Assert that every rank has the sum in the order of the tree, and that nothing was moved or added in vain."""
    root = TreeNode(0, plan.spread.replicas)
    held = outcome(plan)
    for of_rank in held:
        for mine in of_rank:
            assert mine[root] == canonical(0, plan.spread.replicas)
    moved = Counter((to, number, node) for _, to, first, stop, node in plan.messages() for number in range(first, stop))
    assert max(moved.values(), default=1) == 1
    if plan.is_scattering:
        assert_scatters(plan)


def assert_scatters(plan: Plan) -> None:
    root = TreeNode(0, plan.spread.replicas)
    held = outcome(plan.scattering)
    for number, owner in enumerate(plan.owners):
        assert [rank for rank, of_rank in enumerate(held) if root in of_rank[number]] == [owner]


def fewest_sums(spread: Spread, owner: int) -> int:
    """Return the smallest number of messages with sums after which the owner of a slice has the result, for any plan.

    Each node of the tree is added on some rank, and each leaf is where it is owned: a message is an edge of the tree
    with different ranks at its ends. The fewest such edges are found from the leaves up (Sankoff, Minimal Mutation
    Trees of Sequences, 1975).
    """
    ranks = range(spread.size)

    def costs(node: TreeNode) -> list[int]:
        """Return for each rank the smallest number of messages after which it has the sum of a node."""
        if node.is_leaf:
            return [int(node not in spread.leaves(rank)) for rank in ranks]
        one, other = map(costs, halves(node))
        added = [left + right for left, right in zip(one, other, strict=True)]
        return [min(cost, min(added) + 1) for cost in added]

    return costs(TreeNode(0, spread.replicas))[owner]


def compositions(replicas: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to give each of `ranks` ranks at least one of `replicas` replicas."""
    if ranks == 1:
        yield (replicas,)
        return
    for count in range(1, replicas - ranks + 2):
        for others in compositions(replicas - count, ranks - 1):
            yield count, *others


def host_spreads(ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to place ranks on at most `most` hosts; hosts are numbered by first use."""

    def put(chosen: list[int]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == ranks:
            yield tuple(chosen)
            return
        for host in range(min(most, max(chosen, default=-1) + 2)):
            yield from put([*chosen, host])

    yield from put([])


def drawn_spread(random: random.Random, replicas: int, most_ranks: int, most_hosts: int) -> Spread:
    ranks = random.randint(1, min(replicas, most_ranks))
    borders = sorted(random.sample(range(1, replicas), ranks - 1))
    counts = [stop - start for start, stop in zip([0, *borders], [*borders, replicas], strict=True)]
    hosts = random.randint(1, min(ranks, most_hosts))
    places = [*range(hosts), *(random.randrange(hosts) for _ in range(ranks - hosts))]
    if random.random() < 0.8:
        places.sort()
    else:
        random.shuffle(places)
    numbers: dict[int, int] = {}
    return Spread(tuple(counts), tuple(numbers.setdefault(place, len(numbers)) for place in places))
