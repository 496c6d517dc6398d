"""The two passes of the ordered ring, as one rank goes through them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collectives.reduction import Reduction
from collectives.ring.link import LANES, Fetch, Link, Transfer
from collectives.transport import Parts

DEPTH = 4  # chunks under way on each lane
EXCHANGE, PARTIALS, RESULTS = range(LANES)


class Place:
    """The place of one rank in the ring, and memory for its passes.

    Attributes:
        link: how messages travel.
        rank: this one.
        size: how many there are.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rank = link.rank
        self.size = link.size
        self._scratch = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def scratch(self, number: int, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
        """Memory for one pass, the same at every call: fresh pages cost more than the sums."""
        nbytes = rows * columns * dtype.itemsize
        if self._scratch[number].size < nbytes:
            self._scratch[number] = np.empty(nbytes, np.uint8)
        return self._scratch[number][:nbytes].view(dtype).reshape(rows, columns)


@dataclass(frozen=True)
class Chunk:
    """What goes through the ring together.

    Attributes:
        place: where it lies in the contributions.
        result: where this rank keeps the result; None where it needs none.
        destinations: the ranks, but for the last one, that need the result: that one sends it to the first of them,
            each of them to the next.
    """

    place: slice
    result: np.ndarray | None
    destinations: range


class PartialPass:
    """The first pass on one rank: take the partial sum of each chunk, add the own replicas, hand it on."""

    def __init__(
        self,
        ring: Place,
        contributions: Sequence[np.ndarray],
        reduction: Reduction,
        parts: Parts,
        plan: Sequence[Chunk],
    ) -> None:
        self._link = ring.link
        self._contributions = contributions
        self._reduction = reduction
        self._replicas = parts.total
        self._plan = plan
        self._is_first = ring.rank == 0
        self._is_last = ring.rank == ring.size - 1
        self._before = ring.rank - 1
        self._after = (ring.rank + 1) % ring.size
        longest = max((chunk.place.stop - chunk.place.start for chunk in plan), default=0)
        rows = min(DEPTH, len(plan))
        self._sends: deque[tuple[Transfer, int]] = deque()
        self._receives: deque[Fetch] = deque()
        self._forwards_own = self._is_first and len(contributions) == 1
        self._received = reduction.first_dtype(parts.counts[0]) if ring.rank == 1 else reduction.accumulator
        self._incoming = ring.scratch(0, 0 if self._is_first else rows, longest, self._received)
        keeps_all = self._is_last and all(chunk.result is not None for chunk in plan)
        self._outgoing = ring.scratch(
            1,
            0 if keeps_all or self._forwards_own else rows,
            longest,
            reduction.dtype if self._is_last else reduction.accumulator,
        )
        self._next = 0
        self._posted = 0
        self._post()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to receive or to send."""
        return self._next == len(self._plan) and not self._sends

    def waits_for(self) -> list[int]:
        """The ranks without which this pass cannot go on."""
        if self._sends and (len(self._sends) == DEPTH or self._next == len(self._plan)):
            return [self._after]
        return [] if self._is_first or self._next == len(self._plan) else [self._before]

    def advance(self) -> bool:
        """Do what can be done at once; whether anything was."""
        drain(self._sends)
        moved = False
        while self._next < len(self._plan) and len(self._sends) < DEPTH and self._step():
            moved = True
        return moved or self.is_over

    def _step(self) -> bool:
        chunk = self._plan[self._next]
        partial: list[np.ndarray] = []
        if not self._is_first:
            fetch = self._receives[0]
            if not fetch.done():
                return False
            self._receives.popleft()
            partial = [fetch.message.view(self._received)]
        mine = [contribution[chunk.place] for contribution in self._contributions]
        if self._is_last:
            result = self._room(chunk) if chunk.result is None else chunk.result
            self._reduction.reduce(partial + mine, result, self._replicas)
            if chunk.destinations:
                self._send(result, chunk.destinations[0], RESULTS)
        elif self._forwards_own:
            self._send(mine[0], self._after, PARTIALS)
        else:
            total = self._room(chunk)
            self._reduction.fold(partial + mine, total)
            self._send(total, self._after, PARTIALS)
        self._next += 1
        self._post()
        return True

    def _room(self, chunk: Chunk) -> np.ndarray:
        """Memory for what is sent next; what was sent from there before has left."""
        room: np.ndarray = self._outgoing[self._next % DEPTH][: chunk.place.stop - chunk.place.start]
        return room

    def _send(self, data: np.ndarray, to: int, lane: int) -> None:
        self._sends.append((self._link.send(data.view(np.uint8), to, lane), to))

    def _post(self) -> None:
        """Have receives waiting for the next partial sums."""
        while not self._is_first and self._posted < min(len(self._plan), self._next + DEPTH):
            place = self._plan[self._posted].place
            row = self._incoming[self._posted % DEPTH][: place.stop - place.start]
            self._receives.append(self._link.fetch(row.view(np.uint8), self._before, PARTIALS))
            self._posted += 1


class ResultPass:
    """The second pass on one rank: take the finished chunks that it needs, hand on those that others need."""

    def __init__(self, ring: Place, plan: Sequence[Chunk]) -> None:
        self._link = ring.link
        self._after = ring.rank + 1
        self._plan = [
            (chunk.result.view(np.uint8), self._source(ring, chunk), ring.rank < chunk.destinations[-1])
            for chunk in plan
            if ring.rank in chunk.destinations and chunk.result is not None
        ]
        self._sends: deque[tuple[Transfer, int]] = deque()
        self._receives: deque[Transfer] = deque()
        self._next = 0
        self._posted = 0
        self._post()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to receive or to send."""
        return self._next == len(self._plan) and not self._sends

    def waits_for(self) -> list[int]:
        """The ranks without which this pass cannot go on."""
        return [self._plan[self._next][1]] if self._receives else [self._after]

    def advance(self) -> bool:
        """Do what can be done at once; whether anything was."""
        drain(self._sends)
        moved = False
        while self._receives and self._receives[0].done():
            self._receives.popleft()
            data, _, is_needed_after = self._plan[self._next]
            if is_needed_after:
                self._sends.append((self._link.send(data, self._after, RESULTS), self._after))
            self._next += 1
            self._post()
            moved = True
        return moved or self.is_over

    def _post(self) -> None:
        while self._posted < min(len(self._plan), self._next + DEPTH):
            into, source, _ = self._plan[self._posted]
            self._receives.append(self._link.receive(into, source, RESULTS))
            self._posted += 1

    @staticmethod
    def _source(ring: Place, chunk: Chunk) -> int:
        """The rank from which this one gets the result."""
        return ring.size - 1 if ring.rank == chunk.destinations[0] else ring.rank - 1


def drain(transfers: deque[tuple[Transfer, int]]) -> bool:
    """Forget the transfers at the front that are done; whether none is left."""
    while transfers and transfers[0][0].done():
        transfers.popleft()
    return not transfers
