"""The ordered ring: partial sums travel from rank 0 to the last rank, and the result from there once round the ring.

Rank 0 begins each chunk with the sum of its own replicas, every further rank adds its replicas one after another, and
the last rank finishes the chunk and sends it on to 0, 1, ... Each link carries every byte at most twice; the chunks are
pipelined and both passes overlap. Whoever owns the replicas, the sum is taken in their order.

Small arrays never enter the ring: they travel with the exchange that precedes every collective, from every rank to
every other one, and each rank adds all of them itself. Arrays of medium size are cut into one slice per rank; every
rank receives the others' parts of its slice, reduces it and sends it to all, as long as this moves no more bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from collectives.errors import PeerLostError
from collectives.link import CHUNK_BYTES, DIRECT_BYTES, Link, Transfer
from collectives.memory import aligned_empty
from collectives.reduction import Reduction
from collectives.ring_passes import EXCHANGE, PARTIALS, RESULTS, PartialPass, ResultPass, drain
from collectives.transport import Parts, Transport
from collectives.waiting import Watch

INLINE_BYTES = 1 << 16  # per rank and exchange
CHUNKS_AT_LEAST = 16  # of long arrays
_HEADER_BYTES = 64
_FINGERPRINT, _COUNT, _NBYTES = 0, 1, 2  # the words of a header
_PLANS = 256  # cached layouts
_TOO_LARGE = (1 << 64) - 1
_MOST_ARRAYS = 1 << 20  # that one rank contributes


class RingTransport(Transport):
    """Ranks that are connected by a link.

    Args:
        link: how messages travel.
        watch: how to wait.
        chunk_bytes: the size of a message in the pipelined passes.
        inline_bytes: how much each rank may send to every other one along with an exchange.
        direct_bytes: up to which size slices are sent to the rank that reduces them.
    """

    def __init__(
        self,
        link: Link,
        watch: Watch,
        chunk_bytes: int = CHUNK_BYTES,
        inline_bytes: int = INLINE_BYTES,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        self.rank = link.rank
        self.size = link.size
        self.link = link
        self._watch = watch
        self._chunk_bytes = chunk_bytes
        self._inline_bytes = inline_bytes
        self._direct_bytes = direct_bytes
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._parity = 0
        self._scratch = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._inline: dict[tuple[np.dtype, int, int], list[tuple[list[np.ndarray], Parts]]] = {}
        room = _HEADER_BYTES + inline_bytes
        self._buffers = [[aligned_empty(room) for _ in range(self.size)] for _ in (0, 1)]
        self._headers = [[buffer[:_HEADER_BYTES].data.cast("Q") for buffer in buffers] for buffers in self._buffers]

    # ---- exchange

    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        # Two sets of buffers: the arrays of one exchange stay readable until the next but one has begun.
        parity = self._parity = 1 - self._parity
        buffers, headers = self._buffers[parity], self._headers[parity]
        receives = [self.link.receive(buffers[other], other, EXCHANGE) for other in self._others]
        own, header = buffers[self.rank], headers[self.rank]
        nbytes = len(arrays) and arrays[0].nbytes * count
        plan = None
        if nbytes > self._inline_bytes:
            nbytes = _TOO_LARGE
        elif nbytes:
            first = arrays[0]
            plan = self._inline.get((first.dtype, first.size, count)) or self._plan_inline(first, count)
            slots, parts = plan[parity]
            for slot, array in zip(slots, arrays, strict=True):
                slot[...] = array
        header[_FINGERPRINT], header[_COUNT], header[_NBYTES] = fingerprint, count, nbytes
        message = own[:_HEADER_BYTES] if plan is None else own[: _HEADER_BYTES + nbytes]
        sends = [self.link.send(message, other, EXCHANGE) for other in self._others]
        self._complete(receives, self._others)
        self._complete(sends, self._others)
        alike = True
        for other, receive in zip(self._others, receives, strict=True):
            theirs = headers[other]
            if theirs[_FINGERPRINT] != fingerprint:
                return False, Parts((), ())
            if theirs[_COUNT] != count or theirs[_NBYTES] != nbytes or receive.received not in (None, message.size):
                self._check_header(other, theirs, receive.received, arrays)
                alike = False
        if alike and plan is not None:
            return True, parts
        counts = tuple(header[_COUNT] for header in headers)
        if plan is None or any(header[_NBYTES] == _TOO_LARGE for header in headers):
            return True, Parts(counts, ())
        return True, Parts(counts, self._inline_views(parity, counts, arrays[0]))

    def _check_header(self, rank: int, header: memoryview, received: int | None, arrays: Sequence[np.ndarray]) -> None:
        """Refuse what no rank of ours would send: a faulty one must not take this one's memory or spoil its sums."""
        count, nbytes = header[_COUNT], header[_NBYTES]
        each = arrays[0].nbytes if arrays else 0
        is_left_at_home = nbytes == _TOO_LARGE and bool(arrays)
        inline = 0 if is_left_at_home else nbytes
        fits = is_left_at_home or (nbytes == count * each <= self._inline_bytes if arrays else nbytes == 0)
        is_plausible = fits and (not arrays or 0 < count <= _MOST_ARRAYS)
        if not is_plausible or received not in (None, _HEADER_BYTES + inline):
            raise PeerLostError(
                f"{self._watch.names[rank]} is lost: it announced {count} arrays of {nbytes} bytes in a message of "
                f"{received}, in {self._watch.call.title}; it is faulty"
            )

    def _plan_inline(self, like: np.ndarray, count: int) -> list[tuple[list[np.ndarray], Parts]]:
        """Views of all buffers for arrays like `like`, `count` from each rank, for both parities."""
        if len(self._inline) > _PLANS:
            self._inline.clear()
        counts = (count,) * self.size
        plan = []
        for parity in (0, 1):
            views = self._inline_views(parity, counts, like)
            plan.append((views[self.rank * count : (self.rank + 1) * count], Parts(counts, views)))
        self._inline[like.dtype, like.size, count] = plan
        return plan

    def _inline_views(self, parity: int, counts: Sequence[int], like: np.ndarray) -> list[np.ndarray]:
        start, step = _HEADER_BYTES, like.nbytes
        return [
            self._buffers[parity][rank][start + number * step : start + (number + 1) * step].view(like.dtype)
            for rank, count in enumerate(counts)
            for number in range(count)
        ]

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
        is_short = out.size * reduction.accumulator.itemsize <= self._direct_bytes
        if is_short and (max(parts.counts) + 1) * (self.size - 1) <= 2 * self.size:
            self._reduce_directly(contributions, out, reduction, parts)
            return
        chunks = _cut(0, out.size, self._chunk_elements(reduction, out.size))
        destinations = range(self.size - 1)
        self._flow(contributions, out, reduction, parts, [(chunk, destinations) for chunk in chunks])

    def reduce_scatter(self, contribution: np.ndarray, out: np.ndarray, reduction: Reduction, parts: Parts) -> None:
        total = np.empty(contribution.size, contribution.dtype)
        step = self._chunk_elements(reduction, out.size)
        plan = [
            (chunk, range(owner, owner + 1) if owner < self.size - 1 else range(0))
            for owner in range(self.size)
            for chunk in _cut(owner * out.size, (owner + 1) * out.size, step)
        ]
        self._flow([contribution], total, reduction, parts, plan)
        np.copyto(out, total[self.rank * out.size : (self.rank + 1) * out.size])

    def _reduce_directly(
        self, contributions: Sequence[np.ndarray], out: np.ndarray, reduction: Reduction, parts: Parts
    ) -> None:
        bounds = [out.size * rank // self.size for rank in range(self.size + 1)]
        slices = [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
        mine = slices[self.rank]
        own = [contribution[mine] for contribution in contributions]
        # Rank 0 begins the sums, so it may send the sum of its replicas instead of each of them.
        counts = [1, *parts.counts[1:]]
        dtypes = [reduction.accumulator] + [reduction.dtype] * (self.size - 1)
        arrived = [
            np.empty((count, mine.stop - mine.start), dtype) for count, dtype in zip(counts, dtypes, strict=True)
        ]
        receives = [
            (self.link.receive(row.view(np.uint8), rank, PARTIALS), rank)
            for rank in self._others
            for row in arrived[rank]
        ]
        sends: list[tuple[Transfer, int]] = []
        for rank in self._others:
            leaving = [contribution[slices[rank]] for contribution in contributions]
            if self.rank == 0 and not (len(leaving) == 1 and reduction.is_direct):
                total = np.empty(leaving[0].size, reduction.accumulator)
                reduction.fold(leaving, total)
                leaving = [total]
            sends += [(self.link.send(part.view(np.uint8), rank, PARTIALS), rank) for part in leaving]
        self._complete_all(receives)
        sources = [part for rank in range(self.size) for part in (own if rank == self.rank else arrived[rank])]
        reduction.reduce(sources, out[mine], parts.total)
        self._complete_all(sends)  # `out` may be what was sent
        receives = [(self.link.receive(out[slices[rank]].view(np.uint8), rank, RESULTS), rank) for rank in self._others]
        result = out[mine].view(np.uint8)
        sends = [(self.link.send(result, rank, RESULTS), rank) for rank in self._others]
        self._complete_all(receives + sends)

    def _complete_all(self, transfers: Sequence[tuple[Transfer, int]]) -> None:
        """Wait until all transfers, each named with its rank, are done."""
        pending = deque(transfers)
        self._watch.wait(lambda: drain(pending), lambda: sorted({rank for _, rank in pending}))

    def _chunk_elements(self, reduction: Reduction, size: int) -> int:
        """Chunks as large as the link likes them, but not so large that filling the ring takes a good part of all."""
        itemsize = reduction.accumulator.itemsize
        nbytes = min(self._chunk_bytes, max(CHUNK_BYTES, size * itemsize // CHUNKS_AT_LEAST))
        return max(1, nbytes // itemsize)

    def _flow(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray,
        reduction: Reduction,
        parts: Parts,
        plan: Sequence[tuple[slice, range]],
    ) -> None:
        """Run both passes. The plan names, for each chunk, the ranks that need its result."""
        last = self.size - 1
        results = ResultPass(self, out, plan) if self.rank < last else None
        partials = PartialPass(self, contributions, out, reduction, parts.total, plan)
        stages: list[PartialPass | ResultPass] = [partials] if results is None else [results, partials]
        while stages := [stage for stage in stages if not stage.is_over]:
            if not _advance(stages):
                self._watch.wait(partial(_advance, stages), partial(_awaited, stages))

    def scratch(self, place: int, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
        """Memory for one pass, the same at every call: fresh pages cost more than the sums."""
        nbytes = rows * columns * dtype.itemsize
        if self._scratch[place].size < nbytes:
            self._scratch[place] = np.empty(nbytes, np.uint8)
        return self._scratch[place][:nbytes].view(dtype).reshape(rows, columns)

    # ---- copies

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        sends: deque[tuple[Transfer, int]] = deque()
        for chunk in _cut(0, buffer.size, self._chunk_bytes):
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
            for chunk in _cut(0, block.size, self._chunk_bytes):
                receive = self.link.receive(incoming[chunk], before, RESULTS)
                send = self.link.send(outgoing[chunk], after, RESULTS)
                self._complete([receive, send], [before, after])

    # ---- memory

    def allocate(self, nbytes: int) -> np.ndarray:
        return aligned_empty(nbytes)

    def close(self) -> None:
        self.link.close()


def _advance(stages: Sequence[PartialPass | ResultPass]) -> bool:
    """Do what can be done at once; whether anything was."""
    return any([stage.advance() for stage in stages])


def _awaited(stages: Sequence[PartialPass | ResultPass]) -> list[int]:
    """The ranks without which none of the stages can go on."""
    return sorted({rank for stage in stages for rank in stage.waits_for()})


def _cut(start: int, stop: int, step: int) -> list[slice]:
    return [slice(first, min(stop, first + step)) for first in range(start, stop, step)]
