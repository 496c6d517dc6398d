"""The pass through a link in which every rank reduces one slice of the array, for which the others send their parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from collectives.reduction import Reduction
from collectives.ring.link import Fetch, Transfer
from collectives.ring.passes import DEPTH, PARTIALS, RESULTS, Place, drain
from collectives.transport import Parts


class SlicePass:
    """What one rank does: send its parts of the others' slices, reduce its own, send that to all, piece by piece.

    Or keep it: then `out` is the slice, and slices are equal.

    Rank 0 begins the sums, so of several replicas it sends the sum instead of each of them.

    Args:
        ring: this rank's place in it.
        contributions: of this rank.
        out: receives the result; may be one of the contributions.
        reduction: the arithmetic.
        parts: what every rank contributes.
        piece: the elements of a slice that travel in one message.
        hands_on: whether the other ranks need the slice.
    """

    def __init__(
        self,
        ring: Place,
        contributions: Sequence[np.ndarray],
        out: np.ndarray,
        reduction: Reduction,
        parts: Parts,
        piece: int,
        hands_on: bool = True,
    ) -> None:
        self._link = ring.link
        self._rank = ring.rank
        self._others = [rank for rank in range(ring.size) if rank != ring.rank]
        self._contributions = contributions
        self._out = out
        self._reduction = reduction
        self._replicas = parts.total
        self._hands_on = hands_on
        size = contributions[0].size
        self._bounds = [size * rank // ring.size for rank in range(ring.size + 1)]
        self._own = 0 if hands_on else self._bounds[ring.rank]  # where `out` begins
        self._piece = piece
        longest = max(stop - start for start, stop in zip(self._bounds, self._bounds[1:], strict=False))
        self._steps = -(-longest // piece)
        depth = min(DEPTH, self._steps)
        self._folds = self._rank == 0 and len(contributions) > 1
        self._arrays = [1, *parts.counts[1:]]  # that each rank sends
        self._dtypes = [reduction.first_dtype(parts.counts[0])] + [reduction.dtype] * (ring.size - 1)
        widest = max(dtype.itemsize for dtype in self._dtypes)
        self._rows = sum(self._arrays[rank] for rank in self._others)
        self._incoming = ring.scratch(0, depth * self._rows, piece * widest, np.dtype(np.uint8))
        self._outgoing = ring.scratch(1, depth * len(self._others) if self._folds else 0, piece, reduction.accumulator)
        self._arriving: deque[deque[tuple[Fetch, int]]] = deque()  # parts, by step
        self._arrived: dict[int, list[np.ndarray]] = {}  # parts of the first of these steps, by rank
        self._leaving: deque[deque[tuple[Transfer, int]]] = deque()
        self._results: deque[tuple[Transfer, int]] = deque()
        self._handed_on: deque[tuple[Transfer, int]] = deque()
        self._expected = self._sent = self._reduced = self._awaited = 0  # the next step of each kind
        self._expect()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to receive or to send."""
        are_results_expected = self._reduced == self._awaited == self._steps
        return are_results_expected and not self._results and not self._handed_on

    def waits_for(self) -> list[int]:
        """The ranks without which this pass cannot go on."""
        if self._arriving:
            return [rank for _, rank in self._arriving[0]]
        leaving = self._leaving[0] if self._leaving else ()
        return [rank for _, rank in (*leaving, *self._results, *self._handed_on)]

    def advance(self) -> bool:
        """Do what can be done at once; whether anything was."""
        moved = False
        while self._sent < min(self._steps, self._reduced + DEPTH) and len(self._leaving) < DEPTH:
            self._send_parts()
            moved = True
        while self._arriving and self._have_parts_come():
            self._reduce()
            moved = True
        while self._leaving and drain(self._leaving[0]):
            self._await_results()
            moved = True
        drain(self._results)
        drain(self._handed_on)
        return moved or self.is_over

    def _range(self, rank: int, step: int) -> slice:
        """A piece of the slice that `rank` reduces; slices differ by an element, so the last piece may be empty."""
        start, stop = self._bounds[rank] + step * self._piece, self._bounds[rank + 1]
        return slice(start, max(start, min(start + self._piece, stop)))

    def _expect(self) -> None:
        """Have receives waiting for parts."""
        while self._expected < min(self._steps, self._reduced + DEPTH):
            place = self._range(self._rank, self._expected)
            row = self._expected % DEPTH * self._rows
            fetches: deque[tuple[Fetch, int]] = deque()
            for rank in self._others:
                nbytes = (place.stop - place.start) * self._dtypes[rank].itemsize
                for _ in range(self._arrays[rank] if nbytes else 0):
                    fetches.append((self._link.fetch(self._incoming[row][:nbytes], rank, PARTIALS), rank))
                    row += 1
            self._arriving.append(fetches)
            self._expected += 1

    def _send_parts(self) -> None:
        sends: deque[tuple[Transfer, int]] = deque()
        row = self._sent % DEPTH * len(self._others)
        for number, rank in enumerate(self._others):
            place = self._range(rank, self._sent)
            if place.start == place.stop:
                continue
            parts = [contribution[place] for contribution in self._contributions]
            if self._folds:
                total = self._outgoing[row + number][: parts[0].size]
                self._reduction.fold(parts, total)
                parts = [total]
            sends += [(self._link.send(part.view(np.uint8), rank, PARTIALS), rank) for part in parts]
        self._leaving.append(sends)
        self._sent += 1

    def _have_parts_come(self) -> bool:
        pending = self._arriving[0]
        while pending and pending[0][0].done():
            fetch, rank = pending.popleft()
            self._arrived.setdefault(rank, []).append(fetch.message.view(self._dtypes[rank]))
        return not pending

    def _reduce(self) -> None:
        place = self._range(self._rank, self._reduced)
        if place.start < place.stop:
            self._arrived[self._rank] = [contribution[place] for contribution in self._contributions]
            sources = [part for _, parts in sorted(self._arrived.items()) for part in parts]
            result = self._out[place.start - self._own : place.stop - self._own]
            self._reduction.reduce(sources, result, self._replicas)
            if self._hands_on:
                sends = [(self._link.send(result.view(np.uint8), rank, RESULTS), rank) for rank in self._others]
                self._handed_on += sends
        self._arriving.popleft()
        self._arrived = {}
        self._reduced += 1
        self._expect()

    def _await_results(self) -> None:
        """The parts of a step have left, so what comes back may be written over them."""
        self._leaving.popleft()
        for rank in self._others if self._hands_on else ():
            place = self._range(rank, self._awaited)
            if place.start < place.stop:
                into = self._out[place].view(np.uint8)
                self._results.append((self._link.receive(into, rank, RESULTS), rank))
        self._awaited += 1
