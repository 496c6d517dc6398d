"""Collectives by messages over a link; reductions follow the plans of `collectives.plans`.

Small arrays travel with the exchange before every collective, from every rank to every other rank, and each rank adds
all of them itself. If a link says so, short sums of each rank travel in the same way. Other arrays go through a plan.
Long arrays go in pieces, several of which are in progress at once.
Broadcast is a pipelined chain of ranks, and all-gather is a ring (Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from typing_extensions import override

from collectives.arrays import aligned_empty
from collectives.calls import Call
from collectives.plans.cutting import UNDER_WAY
from collectives.point_to_point.exchange import COMPARED_BYTES, LinkExchange
from collectives.point_to_point.flow import Arrays, PartialSums, PieceFlow, drain
from collectives.point_to_point.gathering import GatheredSums, Layouts, SumLayout, add_own
from collectives.point_to_point.link import EXCHANGE, RESULTS, Link, Transfer
from collectives.point_to_point.opening import OpeningLink
from collectives.point_to_point.planned import Planned, Planner
from collectives.point_to_point.prepared import Correspondence, PreparedMessages, is_preparable
from collectives.transport import Parts, Prepared, Reducing, Transport
from collectives.waiting import Watch


class PointToPointTransport(Transport):
    """A transport between ranks that are connected by a link.

    Args:
        link: Link between the ranks.
        watch: Limits and messages of waits.
    """

    opens_reductions = True

    def __init__(self, link: Link, watch: Watch) -> None:
        self.rank = link.rank
        self.size = link.size
        self.link = link
        self._memory = PartialSums()
        self._watch = watch
        self._sizes = link.sizes
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._exchange = LinkExchange(link, watch, self._complete)
        self._planner = Planner(link, self._exchange.pairs)
        self._is_between_hosts = len(set(link.hosts)) > 1
        self._announced: Reducing | None = None
        self._opened: PieceFlow | None = None
        self._gathered_bytes = self._sizes.gathered_bytes if self._exchange.is_flat else 0
        self._layouts = Layouts(self.rank, self.size)
        self._gathered: GatheredSums | None = None
        self._mail = link.mail(self._others, EXCHANGE) if self._exchange.is_flat else None
        self.prepares_reductions = self._mail is not None

    # ---- exchange

    @override
    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        announced, self._announced, self._opened, self._gathered = self._announced, None, None, None
        if announced is not None and arrays[0].nbytes * count > self._sizes.inline_bytes:
            layout = self._layout_for(announced, count) if self._gathered_bytes else None
            if layout is not None:
                equal, parts = self._exchange.run(fingerprint, arrays, count, partial(self._gather, announced, layout))
                if not (equal and self._exchange.has_delivered):
                    self._gathered = None
                return equal, parts
            planned = self._planned_for(announced, (count,) * self.size)
            if planned.opens_in >= 0:
                opening = partial(self._open, announced, planned)
                equal, parts = self._exchange.run(fingerprint, arrays, count, opening)
                if not (equal and self._exchange.has_delivered):
                    self._give_up()
                return equal, parts
        return self._exchange.run(fingerprint, arrays, count)

    @override
    def announce(self, reducing: Reducing) -> None:
        self._announced = reducing

    def _layout_for(self, reducing: Reducing, count: int) -> SumLayout | None:
        """Return the layout of sums that are short enough to travel with the exchange, or None."""
        contributions, _, reduction, scatters, _ = reducing
        elements = contributions[0].size
        if scatters or elements * reduction.dtype.itemsize > self._gathered_bytes:
            return None
        layout = self._layouts.layout(reduction, count, elements)
        return layout if max(layout.nbytes) <= self._gathered_bytes else None

    def _gather(self, reducing: Reducing, layout: SumLayout) -> GatheredSums:
        """Add this rank's contributions as if all ranks had equally many."""
        nbytes = layout.elements * reducing.reduction.accumulator.itemsize
        rooms = self._memory.rows(1, len(layout.own), nbytes)
        gathered = self._gathered = add_own(layout, reducing, rooms)
        return gathered

    def _open(self, reducing: Reducing, planned: Planned) -> OpeningLink:
        """Begin to reduce as if all ranks had equally many contributions, up to the first messages to other hosts."""
        link = OpeningLink(self.link, self._exchange.away)
        flow = self._new_flow(reducing, planned, 0, None, link)
        self._opened = flow

        def has_opened() -> bool:
            flow.advance(planned.opens_in + 1)
            return flow.has_entered(planned.opens_in)

        self._watch.wait(has_opened, flow.waits_for)
        return link

    def _give_up(self) -> None:
        """Wait until an abandoned reduction no longer needs its memory."""
        flow, self._opened = self._opened, None
        if flow is not None:
            self._watch.wait(flow.has_sent, flow.waits_for)

    def _complete(self, transfers: Sequence[Transfer], ranks: Sequence[int]) -> None:
        """Wait until all transfers are done; `ranks` has the rank of each transfer, for messages."""
        for transfer in transfers:
            if transfer.done():
                continue
            for _ in range(self._watch.spins):
                if transfer.done():
                    break
            else:
                self._complete_all(list(zip(transfers, ranks, strict=True)))
                return

    # ---- reductions

    @override
    def prepared(self, call: Call, reducing: Reducing, out: np.ndarray) -> Prepared | None:
        count, nbytes = len(reducing.contributions), len(reducing.contributions) * out.nbytes
        is_alike = self._exchange.counts == (count,) * self.size
        if self._mail is None or not is_alike or not is_preparable(reducing):
            return None
        opens = nbytes > self._sizes.inline_bytes
        layout = self._layout_for(reducing, count) if opens else self._inline_layout(reducing, count)
        if layout is None:
            return None
        head = self._exchange.head(call.fingerprint, count, nbytes, opens)
        told = Correspondence(
            layout, head, COMPARED_BYTES, self.rank, self._others, self._mail, self._exchange.expect_told
        )
        return PreparedMessages(told, call, reducing, out, self._watch)

    def _inline_layout(self, reducing: Reducing, count: int) -> SumLayout:
        return self._layouts.layout(reducing.reduction, count, reducing.out.size, adds=False)

    def _planned_for(self, reducing: Reducing, counts: tuple[int, ...]) -> Planned:
        return self._planner.planned(reducing.reduction, counts, reducing.out.size, reducing.scatters)

    def _complete_all(self, transfers: Sequence[tuple[Transfer, int]]) -> None:
        """Wait until all transfers are done; each comes with its rank, for messages."""
        pending = deque(transfers)

        def missing() -> list[int]:
            """Return the ranks whose transfers are pending; a finished transfer of a lost rank does not count."""
            return sorted({rank for transfer, rank in pending if not transfer.done()})

        self._watch.wait(lambda: drain(pending), missing)

    def reduce(self, reducing: Reducing, parts: Parts) -> None:
        """Finish gathered sums, or execute the plan piece by piece, continuing a piece that the exchange has opened."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.finish(reducing)
            return
        planned = self._planned_for(reducing, parts.counts)
        flows: deque[PieceFlow] = deque()
        last, self._opened = self._opened, None
        if last is not None:
            flows.append(last)
        waiting = deque(range(len(flows), len(planned.programs)))
        is_long = self._is_between_hosts and len(planned.programs) > UNDER_WAY  # then busy links matter, not latency
        wait = self._watch.wait_calmly if is_long else self._watch.wait
        while flows or waiting:
            while waiting and len(flows) < UNDER_WAY:
                last = self._new_flow(reducing, planned, waiting.popleft(), last, self.link)
                flows.append(last)
            if not _advance(flows):
                wait(partial(_advance, flows), partial(_awaited, flows))
            while flows and flows[0].is_over:
                flows.popleft()

    def _new_flow(
        self, reducing: Reducing, planned: Planned, number: int, before: PieceFlow | None, link: Link
    ) -> PieceFlow:
        """Return the flow of a piece that begins now."""
        contributions, out, reduction, scatters, _ = reducing
        begins = self.rank * out.size if scatters else 0
        arrays = Arrays(contributions, out, begins, reduction, planned.plan.spread.replicas)
        itemsize, depth = reduction.accumulator.itemsize, min(UNDER_WAY, len(planned.programs))
        room = self._memory.rows(0, depth, itemsize * planned.room)[number % depth]
        added = self._memory.rows(1, depth, itemsize * planned.added)[number % depth]
        offset, program = planned.programs[number]
        return PieceFlow(link, program, arrays, offset, room, added, before)

    # ---- copies

    @override
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

    @override
    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out[self.rank], block)
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for step in range(self.size - 1):
            outgoing = out[(self.rank - step) % self.size]
            incoming = out[(self.rank - step - 1) % self.size]
            self._pass_on(outgoing, after, incoming, before)

    @override
    def shift(self, block: np.ndarray, out: np.ndarray, distance: int) -> None:
        source, to = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        if source == self.rank:
            np.copyto(out, block)
            return
        self._pass_on(block, to, out, source)

    def _pass_on(self, outgoing: np.ndarray, to: int, incoming: np.ndarray, source: int) -> None:
        """Send a block to one rank while a block of the same size comes from another, in chunks."""
        for chunk in _cut(0, outgoing.size, self._sizes.chunk_bytes):
            receive = self.link.receive(incoming[chunk], source, RESULTS)
            send = self.link.send(outgoing[chunk], to, RESULTS)
            self._complete([receive, send], [source, to])

    @property
    @override
    def hosts(self) -> tuple[int, ...]:
        return self.link.hosts or tuple(range(self.size))

    @override
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

    @override
    def allocate(self, nbytes: int) -> np.ndarray:
        return aligned_empty(nbytes)

    @override
    def close(self) -> None:
        self.link.close()


def _advance(flows: Sequence[PieceFlow]) -> bool:
    """Advance all pieces as far as possible; return whether anything was done or the first piece is over."""
    return any([flow.advance() for flow in flows]) or flows[0].is_over


def _awaited(flows: Iterable[PieceFlow]) -> list[int]:
    """Return the ranks for which the pieces wait."""
    return sorted({rank for flow in flows for rank in flow.waits_for()})


def _cut(start: int, stop: int, step: int) -> list[slice]:
    return [slice(first, min(stop, first + step)) for first in range(start, stop, step)]
