"""Reductions by messages: what `collectives.plans` decides, carried out over a link.

Small arrays travel with the exchange that precedes every collective, from every rank to every other one, and each rank
adds all of them itself. Larger ones go through a plan; long ones in pieces, of which several are under way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from collectives.memory import aligned_empty
from collectives.plans.choice import Width, quickest
from collectives.plans.cutting import pieces_of, pieces_of_blocks
from collectives.plans.planning import possible_ways
from collectives.plans.spread import Spread
from collectives.reduction import Reduction
from collectives.ring.exchange import Exchange
from collectives.ring.flow import DEPTH, Arrays, Memory, PieceFlow, drain
from collectives.ring.link import RESULTS, Link, Transfer
from collectives.ring.program import Program, program_of
from collectives.transport import Parts, Transport
from collectives.waiting import Watch

_PLANS = 256  # cached layouts


class RingTransport(Transport):
    """Ranks that are connected by a link.

    Args:
        link: how messages travel.
        watch: how to wait.
    """

    def __init__(self, link: Link, watch: Watch) -> None:
        self.rank = link.rank
        self.size = link.size
        self.link = link
        self._hosts = link.hosts or tuple(range(link.size))
        self._memory = Memory()
        self._programs: dict[tuple[object, ...], list[tuple[int, Program]]] = {}
        self._watch = watch
        self._sizes = link.sizes
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._exchange = Exchange(link, watch, self._complete)

    # ---- exchange

    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        return self._exchange.run(fingerprint, arrays, count)

    def _complete(self, transfers: Sequence[Transfer], ranks: Sequence[int]) -> None:
        """Wait until all transfers, each with the rank of the same place, are done."""
        for transfer in transfers:
            for _ in range(self._watch.spins):
                if transfer.done():
                    break
            else:
                self._complete_all(list(zip(transfers, ranks, strict=True)))
                return

    # ---- reductions

    def reduce(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray,
        reduction: Reduction,
        parts: Parts,
        is_shared: bool = False,
    ) -> None:
        arrays = Arrays(contributions, out, 0, reduction, parts.total)
        self._flow(arrays, self._programs_for(reduction, parts.counts, out.size, scatters=False))

    def reduce_scatter(
        self, contributions: Sequence[np.ndarray], out: np.ndarray, reduction: Reduction, parts: Parts
    ) -> None:
        arrays = Arrays(contributions, out, self.rank * out.size, reduction, parts.total)
        self._flow(arrays, self._programs_for(reduction, parts.counts, out.size, scatters=True))

    def _programs_for(
        self, reduction: Reduction, counts: tuple[int, ...], size: int, scatters: bool
    ) -> list[tuple[int, Program]]:
        """What this rank does for each piece of an array, with the first element of the piece.

        Args:
            reduction: the arithmetic.
            counts: how many arrays each rank contributes.
            size: the elements of the result on this rank.
            scatters: whether that is one of equal blocks.
        """
        key = reduction.dtype, reduction.accumulator, counts, size, scatters
        found = self._programs.get(key)
        if found is None:
            if len(self._programs) > _PLANS:
                self._programs.clear()
            found = self._programs[key] = self._plan_programs(reduction, counts, size, scatters)
        return found

    def _plan_programs(
        self, reduction: Reduction, counts: tuple[int, ...], size: int, scatters: bool
    ) -> list[tuple[int, Program]]:
        spread = Spread(counts, self._hosts)
        width = Width(reduction.dtype.itemsize, reduction.accumulator.itemsize)
        elements = size * self.size if scatters else size
        is_whole = elements * width.partial <= self._sizes.whole_bytes
        ways = list(possible_ways(spread) if is_whole else ("direct",))
        if "doubling" in ways and (scatters or elements * width.partial > self._sizes.chunk_bytes):
            ways.remove("doubling")
        plan = quickest(spread, elements, width, self.link.costs, tuple(ways))
        if scatters:
            plan = plan.scattering
        in_slice = -(-elements // plan.slices)
        widest = width.leaf if max(counts) == 1 else width.partial
        longest = in_slice if is_whole else max(1, self._sizes.chunk_of(in_slice * widest) // widest)
        pieces = pieces_of_blocks(plan, size, longest) if scatters else pieces_of(plan, size, longest * plan.slices)
        programs = {piece.table: program_of(plan, self.rank, piece.table) for piece in pieces}
        return [(piece.offset, programs[piece.table]) for piece in pieces]

    def _complete_all(self, transfers: Sequence[tuple[Transfer, int]]) -> None:
        """Wait until all transfers, each named with its rank, are done."""
        pending = deque(transfers)
        self._watch.wait(lambda: drain(pending), lambda: sorted({rank for _, rank in pending}))

    def _flow(self, arrays: Arrays, programs: Sequence[tuple[int, Program]]) -> None:
        """Go through the pieces, several at the same time."""
        itemsize, depth = arrays.reduction.accumulator.itemsize, min(DEPTH, len(programs))
        rooms = self._memory.rows(0, depth, itemsize * max(program.room for _, program in programs))
        added = self._memory.rows(1, depth, itemsize * max(program.added for _, program in programs))
        flows: deque[PieceFlow] = deque()
        last: PieceFlow | None = None
        waiting = deque(enumerate(programs))
        while flows or waiting:
            while waiting and len(flows) < depth:
                number, (offset, program) = waiting.popleft()
                row = number % depth
                last = PieceFlow(self.link, program, arrays, offset, rooms[row], added[row], last)
                flows.append(last)
            if not _advance(flows):
                self._watch.wait(partial(_advance, flows), partial(_awaited, flows))
            while flows and flows[0].is_over:
                flows.popleft()

    # ---- copies

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        sends: deque[tuple[Transfer, int]] = deque()
        for chunk in _cut(0, buffer.size, self._sizes.chunk_of(buffer.nbytes)):
            if self.rank != root:
                self._complete([self.link.receive(buffer[chunk], before, RESULTS)], [before])
            if after != root:
                sends.append((self.link.send(buffer[chunk], after, RESULTS), after))
        if sends:
            self._watch.wait(lambda: drain(sends), lambda: [after])

    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out[self.rank], block)
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for step in range(self.size - 1):
            outgoing = out[(self.rank - step) % self.size]
            incoming = out[(self.rank - step - 1) % self.size]
            for chunk in _cut(0, block.size, self._sizes.chunk_bytes):
                receive = self.link.receive(incoming[chunk], before, RESULTS)
                send = self.link.send(outgoing[chunk], after, RESULTS)
                self._complete([receive, send], [before, after])

    def gather(self, block: np.ndarray, out: np.ndarray | None, root: int) -> None:
        if out is not None:
            np.copyto(out[self.rank], block)
        for chunk in _cut(0, block.size, self._sizes.chunk_bytes):
            if out is None:
                self._complete([self.link.send(block[chunk], root, RESULTS)], [root])
            else:
                receives = [self.link.receive(out[other, chunk], other, RESULTS) for other in self._others]
                self._complete(receives, self._others)

    # ---- memory

    def allocate(self, nbytes: int) -> np.ndarray:
        return aligned_empty(nbytes)

    def close(self) -> None:
        self.link.close()


def _advance(flows: Sequence[PieceFlow]) -> bool:
    """Do what can be done at once; whether anything was, or the first piece is through."""
    return any([flow.advance() for flow in flows]) or flows[0].is_over


def _awaited(flows: Iterable[PieceFlow]) -> list[int]:
    """The ranks without which none of the pieces can go on."""
    return sorted({rank for flow in flows for rank in flow.waits_for()})


def _cut(start: int, stop: int, step: int) -> list[slice]:
    return [slice(first, min(stop, first + step)) for first in range(start, stop, step)]
