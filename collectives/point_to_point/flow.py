"""The execution of a plan for one piece of an array, on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collectives.point_to_point.link import PARTIALS, RESULTS, Fetch, Link, Transfer
from collectives.point_to_point.program import Area, BufferPart, Parcel, RankProgram, RankRound
from collectives.reduction import Reduction


@dataclass(frozen=True)
class Arrays:
    """The arrays of a reduction.

    Attributes:
        contributions: Arrays of this rank.
        out: Array for the result; may be one of the contributions.
        begins: Index in the contributions of the first element of `out`.
        reduction: Arithmetic of the reduction.
        replicas: Number of contributions of all ranks.
    """

    contributions: Sequence[np.ndarray]
    out: np.ndarray
    begins: int
    reduction: Reduction
    replicas: int


class PartialSums:
    """Scratch memory for partial sums, kept because fresh pages would cost more than the sums."""

    def __init__(self) -> None:
        self._bytes = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def rows(self, number: int, rows: int, nbytes: int) -> list[np.ndarray]:
        """Return `rows` rows of `nbytes` bytes, valid until the next call with the same `number`."""
        if self._bytes[number].size < rows * nbytes:
            self._bytes[number] = np.empty(rows * nbytes, np.uint8)
        return [self._bytes[number][row * nbytes : (row + 1) * nbytes] for row in range(rows)]


class PieceFlow:
    """The work of one rank for one piece: in each turn it adds, sends, and waits for messages.

    Pieces begin in sequence and never overtake each other, so messages between two ranks keep their order.

    Args:
        link: Link between the ranks.
        program: Work of this rank.
        arrays: Arrays of the reduction.
        offset: First element of the piece.
        room: Memory for received partial sums.
        added: Memory for partial sums that this rank computes.
        before: Piece before this one, or None.
    """

    def __init__(
        self,
        link: Link,
        program: RankProgram,
        arrays: Arrays,
        offset: int,
        room: np.ndarray,
        added: np.ndarray,
        before: PieceFlow | None,
    ) -> None:
        self._link = link
        self._program = program
        self._arrays = arrays
        self._offset = offset
        self._added = added.view(arrays.reduction.accumulator)
        self._before = before
        self._next = 0
        self._parts: deque[tuple[Transfer, int]] = deque()
        self._results: deque[tuple[Transfer, int]] = deque()
        self._coming: deque[tuple[Transfer, int]] = deque()
        self._fetches = [self._fetch(parcel, room) for parcel in program.fetches]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to receive or to send."""
        return self._next == len(self._program.turns) and not (self._coming or self._parts or self._results)

    def has_sent(self) -> bool:
        """Return whether all sent partial sums have been handed to the network."""
        return drain(self._parts)

    def waits_for(self) -> list[int]:
        """Return the ranks whose transfers this piece awaits."""
        return [rank for _, rank in self._coming or (*self._parts, *self._results)]

    def advance(self, turns: int | None = None) -> bool:
        """Do everything that is possible without waiting, up to turn `turns`; return whether anything was done."""
        moved = False
        drain(self._parts)
        drain(self._results)
        while self._next != turns and self._has_all_come() and self._may_enter():
            self._enter(self._program.turns[self._next])
            self._next += 1
            moved = True
        return moved

    def _has_all_come(self) -> bool:
        """Return whether all messages of the last turn have come. A link must be polled for earlier messages first."""
        if self._before is not None:
            if self._before.is_over:
                self._before = None
            elif self._coming and not self._before.has_ended(self._next - 1):
                return False
        return drain(self._coming)

    def _may_enter(self) -> bool:
        if self._next == len(self._program.turns):
            return False
        if self._before is not None and not self._before.has_entered(self._next):
            return False
        return not self._program.turns[self._next].overwrites or drain(self._parts)

    def has_entered(self, turn: int) -> bool:
        """Return whether the piece has entered the turn with this number."""
        return self._next > turn

    def has_ended(self, turn: int) -> bool:
        """Return whether the piece has received everything of the turn with this number."""
        return self._next > turn + 1 or (self._next == turn + 1 and not self._coming)

    def _enter(self, turn: RankRound) -> None:
        arrays, reduction = self._arrays, self._arrays.reduction
        for sources, nodes, into, elements in turn.sums:
            given = [self._at(place, elements) for place in sources]
            if into.kind is Area.RESULT:
                reduction.reduce(given, self._at(into, elements), arrays.replicas, nodes)
            else:
                reduction.fold(given, self._at(into, elements), nodes)
        for parcel in turn.parts:
            part = self._at(parcel.place, parcel.elements).view(np.uint8)
            self._parts.append((self._link.send(part, parcel.other, PARTIALS), parcel.other))
        for others, place, elements in turn.results:
            result = self._at(place, elements).view(np.uint8)
            self._results += zip(self._link.send_all(result, others, RESULTS), others, strict=True)
        for number in turn.fetched:
            self._coming.append((self._fetches[number], self._program.fetches[number].other))
        for parcel in turn.received:
            result = self._at(parcel.place, parcel.elements).view(np.uint8)
            self._coming.append((self._link.receive(result, parcel.other, RESULTS), parcel.other))

    def _at(self, place: BufferPart, elements: int) -> np.ndarray:
        kind, number, start = place
        if kind is Area.OWN:
            start += self._offset
            return self._arrays.contributions[number][start : start + elements]
        if kind is Area.RESULT:
            start += self._offset - self._arrays.begins
            return self._arrays.out[start : start + elements]
        if kind is Area.ADDED:
            return self._added[start : start + elements]
        message = self._fetches[number].message
        return message.view(self._dtype(self._program.fetches[number]))[start : start + elements]

    def _dtype(self, parcel: Parcel) -> np.dtype:
        return self._arrays.reduction.dtype_of(parcel.node)

    def _fetch(self, parcel: Parcel, room: np.ndarray) -> Fetch:
        start = parcel.place.start * self._arrays.reduction.accumulator.itemsize
        nbytes = parcel.elements * self._dtype(parcel).itemsize
        return self._link.fetch(room[start : start + nbytes], parcel.other, PARTIALS)


def drain(transfers: deque[tuple[Transfer, int]]) -> bool:
    """Remove finished transfers at the front; return whether none is left."""
    while transfers and transfers[0][0].done():
        transfers.popleft()
    return not transfers
