"""Makes reduction plans: columns of ranks add between hosts, after each host has added what it owns.

An array is cut into columns, and in each column one rank works for each host. First it gets what the other ranks of its
host own of the column; then the ranks of the column add between hosts, in one of several ways; at last each gives the
results to the ranks of its host. So a host's link carries what one rank would send, however many ranks sit behind it.
Where there is one host, nothing is left between hosts; where each rank has a host to itself, nothing is left inside.
With one column the first rank of each host works for all of it, and hosts exchange as few messages as they can.

A way to add between hosts sees one column: one rank of each host, which has all that its host owns. It is a function of
the nodes that the rank of each host begins with, and of the number of replicas. It gives who finishes which slice of
the column (-1: all), and rounds, in which hosts stand for those ranks.
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
Run = tuple[int, int, int]  # slices from the first on, up to the second, and the place in a group that has them
Way = Callable[[Held, int], Column]


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


def direct(held: Held, replicas: int) -> Column:
    """Every host sends its sums of each slice to the one that finishes it, which sends the result to all.

    Two rounds, whatever the hosts own. Hosts that own one node each send 2 (n - 1) / n of the array. In turn every host
    begins with the one behind it, so that not all of them send to one.
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
    """Neighbours exchange halves, then pairs of them quarters, and so on; the results go back the same way.

    Recursive halving and doubling, beginning with the nearest (Thakur, Rabenseifner and Gropp, Optimization of
    Collective Communication Operations in MPICH, 2005). 2 log2(n) rounds, and every host sends 2 (n - 1) / n of the
    array, also where n is no power of two. See `pairs_up` for where it is possible.
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
    """Neighbours exchange all, then pairs of them, and so on: log2(n) rounds, each with the whole array.

    Every rank finishes everything. See `pairs_up` for where it is possible.
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
    """Return whether hosts, but for the last one, own equal nodes of a power of two replicas: so pairs own nodes."""
    size = sum(node.stop - node.first for node in held[0])
    return size & (size - 1) == 0 and all(
        merged(nodes, replicas) == (TreeNode(host * size, min(replicas, (host + 1) * size)),)
        for host, nodes in enumerate(held)
    )


class Groups:
    """Hosts in groups of 1, 2, 4, ... neighbours, of which the last may be smaller.

    In a group each slice has one responsible host, which has the group's sum of it. That is the one whose place in the
    group has the same low bits as the number of the slice's owner; where the group is too small to have that place,
    leading bits are dropped.

    Args:
        held: the nodes that each host begins with; they pair up, and there are several hosts.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._count = len(held)
        self.levels = (self._count - 1).bit_length()
        self._runs: dict[tuple[int, int], tuple[list[Run], dict[int, list[Run]]]] = {}
        self.owners = tuple(sorted(range(self._count), key=self._reversed_bits))

    def paired(self, level: int) -> Iterator[int]:
        """Yield the hosts whose groups of 2^level are joined with another one."""
        return (host for host in range(self._count) if self.sibling(host, level) < self._count)

    def sibling(self, host: int, level: int) -> int:
        """Return the first host of the group with which that of a host is joined; that may be behind all hosts."""
        return ((host >> level) ^ 1) << level

    def counterpart(self, host: int, level: int) -> int:
        """Return the one of that group from which a host has its sum, where all of a group have it."""
        first, size = self._group(self.sibling(host, level), level)
        return first + _place(host, level, size)

    def node(self, host: int, level: int) -> TreeNode:
        """Return what a host's group of 2^level owns."""
        first = host >> level << level
        last = min(self._count, first + (1 << level)) - 1
        return TreeNode(self._held[first][0].first, self._held[last][-1].stop)

    def parts(self, host: int, level: int) -> tuple[TreeNode, ...]:
        """Return what a host has of its group's sum before the group is joined: until then it has added nothing."""
        own = self.node(host, level)
        return self._held[host] if own == self.node(host, 0) else (own,)

    def destinations(self, host: int, level: int) -> Iterator[tuple[int, int, int]]:
        """Runs of the slices for which a host is responsible, and who is in the group that is joined next."""
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
        """Return the responsible hosts in a group of 2^level: all runs, and those of each place."""
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
        """Return the first host of a host's group of 2^level, and how many there are."""
        first = host >> level << level
        return first, min(self._count - first, 1 << level)

    def _reversed_bits(self, host: int) -> int:
        return int(f"{host:0{max(1, self.levels)}b}"[::-1], 2)


def _place(owner: int, level: int, size: int) -> int:
    """Return the place with the low bits of an owner in a group of 2^level, of which so many are there."""
    place = owner & ((1 << level) - 1)
    while place >= size:
        place ^= 1 << (place.bit_length() - 1)
    return place


def inside(nodes: Iterable[TreeNode], whole: TreeNode) -> tuple[TreeNode, ...]:
    """Return those of some nodes that are parts of another one."""
    return tuple(node for node in nodes if whole.covers(node))


def _rounds(*rounds: tuple[Sequence[Addition], Sequence[Message]]) -> list[Round]:
    return [Round(tuple(additions), tuple(messages)) for additions, messages in rounds]


WAYS: dict[str, Way] = {"direct": direct, "halving": halving, "doubling": doubling}
"""All of them, by name."""
