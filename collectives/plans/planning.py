"""The construction of reduction plans: each host adds its own, then columns of ranks add between hosts.

An array is cut into columns. In each column one rank works for each host. First it receives the column's partial sums
from the other ranks of its host. Then the ranks of the column add between hosts, in one of several ways. Finally
each of them sends the results to the other ranks of its host. So a host's link carries the bytes of a single rank,
however many ranks the host has. With one host nothing is left between hosts; with one rank per host nothing is left
inside hosts. With one column the first rank of each host works for all of it, and hosts exchange as few messages as
possible.

A way to add between hosts sees one column, with one rank per host that has all of the host's values. It is a function
of each host's nodes and of the number of replicas. It returns the finishing host of each slice of the column (-1: all
hosts), and rounds with hosts in place of ranks.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, zip_longest

from collectives.plans.plan import Addition, Message, Plan, Round
from collectives.plans.spread import Spread
from collectives.tree import TreeNode, merged, root_of

_CACHED = 256

Held = Sequence[tuple[TreeNode, ...]]
Column = tuple[tuple[int, ...], list[Round]]
Run = tuple[int, int, int]  # first slice, slice after the last one, and the place in a group that is responsible
Way = Callable[[Held, int], Column]


@lru_cache(_CACHED)
def plan_for(spread: Spread, way: str, columns: int = 0) -> Plan:
    """Return the plan of a reduction.

    Args:
        spread: Spread of replicas over ranks and hosts.
        way: Name of the way, one of `possible_ways`.
        columns: Number of columns of the array; default: the number of ranks of the largest host.
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
    """Return the names of the ways that are possible for a spread."""
    workers = tuple(ranks[0] for ranks in spread.ranks_of)
    if len(workers) > 1 and pairs_up(_held(spread, workers), spread.replicas):
        return tuple(WAYS)
    return ("direct",)


def _held(spread: Spread, workers: tuple[int, ...]) -> list[tuple[TreeNode, ...]]:
    """Return each worker's initial nodes: its own contributions, and the partial sums of the others of its host."""
    held = []
    for ranks, worker in zip(spread.ranks_of, workers, strict=True):
        nodes = [*spread.leaves(worker), *(node for rank in ranks if rank != worker for node in spread.sums[rank])]
        held.append(tuple(sorted(nodes)))
    return held


def _gathering(spread: Spread, workers: tuple[int, ...], first: int, stop: int) -> Round:
    """Return the first round: the other ranks of each host add up their column values and send them."""
    additions, messages = [], []
    for ranks, worker in zip(spread.ranks_of, workers, strict=True):
        for rank in ranks:
            for node in spread.sums[rank] if rank != worker else ():
                if not node.is_leaf:
                    additions.append(Addition(rank, first, stop, inside(spread.leaves(rank), node), node))
                messages.append(Message(rank, worker, first, stop, node))
    return Round(tuple(additions), tuple(messages))


def _spreading(spread: Spread, workers: tuple[int, ...], first: int, stop: int) -> Round:
    """Return the last round: each worker sends the column's results to the other ranks of its host."""
    root = root_of(spread.replicas)
    messages = [
        Message(worker, rank, first, stop, root)
        for ranks, worker in zip(spread.ranks_of, workers, strict=True)
        for rank in ranks
        if rank != worker
    ]
    return Round((), tuple(messages))


def _moved(each: Round, workers: tuple[int, ...], start: int) -> Round:
    """Translate a round of one column: hosts become ranks, and slices follow those of earlier columns."""
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


def direct(held: Held, replicas: int) -> Column:
    """Send all partial sums of each slice to the host that finishes it; that host sends the result to all.

    It takes two rounds for any spread. If hosts own one node each, each sends 2 (n - 1) / n of the array. Every host
    begins with the next host, so that they do not all send to the same one.
    """
    count, root = len(held), root_of(replicas)
    sums = [merged(nodes, replicas) for nodes in held]
    adding, parts, finishing, results = [], [], [], []
    for host in range(count):
        others = [(host + turn) % count for turn in range(1, count)]
        runs = [(first, stop) for first, stop in ((0, host), (host + 1, count)) if first < stop]
        adding += [
            Addition(host, *run, inside(held[host], node), node)
            for node in sums[host]
            if node not in held[host]
            for run in runs
        ]
        parts += [Message(host, to, to, to + 1, node) for to in others for node in sums[host]]
        nodes = sorted([*held[host], *(node for other in others for node in sums[other])])
        finishing.append(Addition(host, host, host + 1, tuple(nodes), root))
        results += [Message(host, to, host, host + 1, root) for to in others]
    return tuple(range(count)), _rounds((adding, parts), (finishing, results))


def halving(held: Held, replicas: int) -> Column:
    """Exchange halves with a neighbour, then quarters between pairs, and so on; return the results on the same paths.

    This is recursive halving and doubling, nearest neighbours first (Thakur, Rabenseifner and Gropp, Optimization of
    Collective Communication Operations in MPICH, 2005). It takes 2 log2(n) rounds. Every host sends 2 (n - 1) / n of
    the array, also if n is no power of two. It is possible if `pairs_up` holds.
    """
    groups = Groups(held)
    owners = groups.owners
    rounds: list[tuple[list[Addition], list[Message]]] = []
    results: list[list[Message]] = []
    merging: list[Addition] = []
    for level in range(groups.levels):
        additions, merging, messages, back = merging, [], [], []
        for host in groups.paired(level):
            own = groups.node(host, level)
            for first, stop, to in groups.destinations(host, level):
                if to == host:
                    nodes = sorted([*groups.parts(host, level), groups.node(groups.sibling(host, level), level)])
                    merging.append(Addition(host, first, stop, tuple(nodes), groups.node(host, level + 1)))
                    continue
                if len(groups.parts(host, level)) > 1:
                    additions.append(Addition(host, first, stop, groups.parts(host, level), own))
                messages.append(Message(host, to, first, stop, own))
                back.append(Message(to, host, first, stop, root_of(replicas)))
        rounds.append((additions, messages))
        results.append(back)
    rounds.append((merging, results.pop() if results else []))
    rounds += [([], back) for back in reversed(results)]
    return owners, _rounds(*rounds)


def doubling(held: Held, replicas: int) -> Column:
    """Exchange everything with a neighbour, then between pairs, and so on: log2(n) rounds with the whole array.

    This is recursive doubling (Thakur, Rabenseifner and Gropp, 2005). Every rank finishes everything. It is possible if
    `pairs_up` holds.
    """
    groups = Groups(held)
    rounds: list[tuple[list[Addition], list[Message]]] = []
    merging: list[Addition] = []
    for level in range(groups.levels):
        additions, merging, messages = merging, [], []
        for host in groups.paired(level):
            own, parts = groups.node(host, level), groups.parts(host, level)
            if len(parts) > 1:
                additions.append(Addition(host, 0, 1, parts, own))
            partner = groups.sibling(host, level)
            messages.append(Message(groups.counterpart(host, level), host, 0, 1, groups.node(partner, level)))
            nodes = tuple(sorted([own, groups.node(partner, level)]))
            merging.append(Addition(host, 0, 1, nodes, groups.node(host, level + 1)))
        rounds.append((additions, messages))
    rounds.append((merging, []))
    return (-1,), _rounds(*rounds)


def pairs_up(held: Held, replicas: int) -> bool:
    """Return whether each host owns one node of 2^k replicas, the last host perhaps fewer, so pairs own nodes."""
    size = sum(node.stop - node.first for node in held[0])
    return size & (size - 1) == 0 and all(
        merged(nodes, replicas) == (TreeNode(host * size, min(replicas, (host + 1) * size)),)
        for host, nodes in enumerate(held)
    )


class Groups:
    """Hosts in groups of 1, 2, 4, ... neighbours; the last group may be smaller.

    In each group one host is responsible for each slice: it has the group's sum of the slice. Its place in the group is
    the low bits of the slice owner's number. If the group is too small for that place, leading bits are dropped.

    Args:
        held: Initial nodes of each host; there are several hosts, and they pair up.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._count = len(held)
        self.levels = (self._count - 1).bit_length()
        self._runs: dict[tuple[int, int], tuple[list[Run], dict[int, list[Run]]]] = {}
        self.owners = tuple(sorted(range(self._count), key=self._reversed_bits))

    def paired(self, level: int) -> Iterator[int]:
        """Yield the hosts whose groups of 2^level are joined with another group."""
        return (host for host in range(self._count) if self.sibling(host, level) < self._count)

    def sibling(self, host: int, level: int) -> int:
        """Return the first host of the group that is joined with the host's group; it may be beyond the last host."""
        return ((host >> level) ^ 1) << level

    def counterpart(self, host: int, level: int) -> int:
        """Return the host of the sibling group that sends its sum to `host`, if all hosts of a group have the sum."""
        first, size = self._group(self.sibling(host, level), level)
        return first + _place(host, level, size)

    def node(self, host: int, level: int) -> TreeNode:
        """Return the node of a host's group of 2^level."""
        first = host >> level << level
        last = min(self._count, first + (1 << level)) - 1
        return TreeNode(self._held[first][0].first, self._held[last][-1].stop)

    def parts(self, host: int, level: int) -> tuple[TreeNode, ...]:
        """Return the nodes that a host holds of its group's sum before the group is joined."""
        own = self.node(host, level)
        return self._held[host] if own == self.node(host, 0) else (own,)

    def destinations(self, host: int, level: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of slices for which `host` is responsible, each with the responsible host of the joined group."""
        first, size = self._group(host, level)
        joined, joined_size = self._group(host, level + 1)
        others, _ = self._responsible(level + 1, joined_size)
        _, own = self._responsible(level, size)
        for start, stop, _ in own[host - first]:
            for number in range(bisect(others, start, key=lambda run: run[0]) - 1, len(others)):
                begun, ended, to = others[number]
                if begun >= stop:
                    break
                yield max(start, begun), min(stop, ended), joined + to

    def _responsible(self, level: int, size: int) -> tuple[list[Run], dict[int, list[Run]]]:
        """Return the responsible places in a group of 2^level: all runs in order, and the runs of each place."""
        if (level, size) not in self._runs:
            places = groupby(range(self._count), lambda number: _place(self.owners[number], level, size))
            every, of_places = [], defaultdict(list)
            for place, numbers in places:
                first, *others = numbers
                every.append((first, first + len(others) + 1, place))
                of_places[place].append(every[-1])
            self._runs[level, size] = every, of_places
        return self._runs[level, size]

    def _group(self, host: int, level: int) -> tuple[int, int]:
        """Return the first host of a host's group of 2^level, and the number of hosts in it."""
        first = host >> level << level
        return first, min(self._count - first, 1 << level)

    def _reversed_bits(self, host: int) -> int:
        return int(f"{host:0{max(1, self.levels)}b}"[::-1], 2)


def _place(owner: int, level: int, size: int) -> int:
    """Return the place of an owner's low bits in a group of 2^level that has `size` hosts."""
    place = owner & ((1 << level) - 1)
    while place >= size:
        place ^= 1 << (place.bit_length() - 1)
    return place


def inside(nodes: Iterable[TreeNode], whole: TreeNode) -> tuple[TreeNode, ...]:
    """Return the nodes that lie inside `whole`."""
    return tuple(node for node in nodes if whole.covers(node))


def _rounds(*rounds: tuple[Sequence[Addition], Sequence[Message]]) -> list[Round]:
    return [Round(tuple(additions), tuple(messages)) for additions, messages in rounds]


WAYS: dict[str, Way] = {"direct": direct, "halving": halving, "doubling": doubling}
"""All ways, by name."""
