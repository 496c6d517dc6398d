"""The work of one rank in a plan, for arrays of one layout: which memory it adds, sends and receives, in elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from collectives.plans.cutting import Table
from collectives.plans.plan import Addition, Message, Plan
from collectives.tree import TreeNode, root_of

_ALIGNMENT = 16  # in elements


class Area(Enum):
    """A kind of memory for values."""

    OWN = "in the contribution with this number"
    RESULT = "in the result"
    ADDED = "where partial results are kept"
    FETCHED = "in the partial sum with this number, of those that others send"


class BufferPart(NamedTuple):
    """A place in memory.

    Attributes:
        kind: Kind of memory.
        number: Number of the contribution or of the received partial sum (see `Area`); otherwise 0.
        start: First element in that memory.
    """

    kind: Area
    number: int
    start: int

    def behind(self, elements: int) -> BufferPart:
        """Return the place `elements` elements further on."""
        return BufferPart(self.kind, self.number, self.start + elements)


class Sum(NamedTuple):
    """An addition of neighbours in the tree.

    Attributes:
        sources: Places of the operands.
        nodes: Nodes of the operands.
        into: Place of the sum; in the result area the sum is finished.
        elements: Number of elements of each.
    """

    sources: tuple[BufferPart, ...]
    nodes: tuple[TreeNode, ...]
    into: BufferPart
    elements: int


class Parcel(NamedTuple):
    """A message of one rank.

    Attributes:
        other: Receiver or sender.
        place: Place of the data.
        elements: Number of elements.
        node: Node of the values.
    """

    other: int
    place: BufferPart
    elements: int
    node: TreeNode


class SharedResult(NamedTuple):
    """A result that is sent to several ranks.

    Attributes:
        others: Receivers.
        place: Place of the data.
        elements: Number of elements.
    """

    others: tuple[int, ...]
    place: BufferPart
    elements: int


@dataclass(frozen=True)
class RankRound:
    """The work of a rank in one round: it adds, then sends, then waits for messages.

    Attributes:
        sums: Additions.
        parts: Partial sums to send.
        results: Results to send.
        fetched: Numbers of the partial sums to receive.
        received: Results to receive.
        overwrites: Whether results overwrite memory of partial sums that may still be in transit.
    """

    sums: tuple[Sum, ...]
    parts: tuple[Parcel, ...]
    results: tuple[SharedResult, ...]
    fetched: range
    received: tuple[Parcel, ...]
    overwrites: bool


@dataclass(frozen=True)
class RankProgram:
    """The work of a rank in a plan.

    Attributes:
        turns: Work of each round, in order.
        fetches: All partial sums to receive.
        room: Memory for all of `fetches` together, in elements.
        added: Memory for partial sums of this rank, in elements.
    """

    turns: tuple[RankRound, ...]
    fetches: tuple[Parcel, ...]
    room: int
    added: int


def program_of(plan: Plan, rank: int, table: Table) -> RankProgram:
    """Return the work of a rank in a plan, for the slice positions of `table`."""
    return _Compiler(plan, rank, table).compiled()


class _Compiler:
    """The translation of a plan for one rank, which tracks the place of every value."""

    def __init__(self, plan: Plan, rank: int, table: Table) -> None:
        self._plan = plan
        self._rank = rank
        self._table = table
        self._root = root_of(plan.spread.replicas)
        leaves = plan.spread.leaves(rank)
        self._held: list[dict[TreeNode, BufferPart]] = [
            {leaf: BufferPart(Area.OWN, number, start) for number, leaf in enumerate(leaves)} for start in table.starts
        ]
        self._fetches: list[Parcel] = []
        self._room = 0
        self._added = 0

    def compiled(self) -> RankProgram:
        turns = []
        for each in self._plan.rounds:
            sums = [made for addition in each.additions if addition.rank == self._rank for made in self._add(addition)]
            sent = [made for message in each.messages if message.source == self._rank for made in self._send(message)]
            begun = len(self._fetches)
            received: list[Parcel] = []
            for message in each.messages:
                if message.to == self._rank:
                    received += self._receive(message)
            finishes_all = not self._plan.is_scattering and any(made.into.kind is Area.RESULT for made in sums)
            turns.append(
                RankRound(
                    tuple(sums),
                    tuple(parcel for parcel in sent if parcel.node != self._root),
                    _delivered(parcel for parcel in sent if parcel.node == self._root),
                    range(begun, len(self._fetches)),
                    tuple(received),
                    bool(received) or finishes_all,
                )
            )
        return RankProgram(tuple(turns), tuple(self._fetches), self._room, self._added)

    def _add(self, addition: Addition) -> Iterator[Sum]:
        _, first, stop, nodes, into = addition
        for begun, ended in self._table.runs(first, stop):
            if into == self._root:
                target = BufferPart(Area.RESULT, 0, self._table.starts[begun])
            else:
                target = BufferPart(Area.ADDED, 0, self._added)
                self._added += _aligned(self._table.elements(begun, ended))
            start = self._table.starts[begun]
            for one, other in self._together(begun, ended, nodes):
                sources = tuple(self._held[one][node] for node in nodes)
                shift = self._table.starts[one] - start
                yield Sum(sources, nodes, target.behind(shift), self._table.elements(one, other))
            self._hold(begun, ended, into, target)

    def _send(self, message: Message) -> Iterator[Parcel]:
        _, to, first, stop, node = message
        for begun, ended in self._table.runs(first, stop):
            ((one, other),) = self._together(begun, ended, (node,))  # one part: the receiver does not know any others
            yield Parcel(to, self._held[one][node], self._table.elements(one, other), node)

    def _receive(self, message: Message) -> Iterator[Parcel]:
        """Yield results; note partial sums among the fetches."""
        source, _, first, stop, node = message
        for begun, ended in self._table.runs(first, stop):
            elements = self._table.elements(begun, ended)
            if node == self._root:
                place = BufferPart(Area.RESULT, 0, self._table.starts[begun])
                yield Parcel(source, place, elements, node)
            else:
                place = BufferPart(Area.FETCHED, len(self._fetches), 0)
                self._fetches.append(Parcel(source, place.behind(self._room), elements, node))
                self._room += _aligned(elements)
            self._hold(begun, ended, node, place)

    def _hold(self, first: int, stop: int, node: TreeNode, place: BufferPart) -> None:
        for number in range(first, stop):
            self._held[number][node] = place.behind(self._table.starts[number] - self._table.starts[first])

    def _together(self, first: int, stop: int, nodes: Sequence[TreeNode]) -> Iterator[tuple[int, int]]:
        """Yield parts of a run with contiguous operands."""
        begun, last = -1, -1
        for number in range(first, stop):
            if not self._table.lengths[number]:
                continue
            if begun < 0:
                begun = number
            elif any(
                self._held[number][node] != self._held[last][node].behind(self._table.lengths[last]) for node in nodes
            ):
                yield begun, number
                begun = number
            last = number
        yield begun, stop


def _delivered(parcels: Iterable[Parcel]) -> tuple[SharedResult, ...]:
    """Group neighbouring parcels of the same place; between two ranks parcels keep their order."""
    together = groupby(parcels, lambda parcel: (parcel.place, parcel.elements))
    return tuple(SharedResult(tuple(parcel.other for parcel in same), *what) for what, same in together)


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
