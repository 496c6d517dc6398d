"""The ordered ring: partial sums travel from rank 0 to the last rank, and the result from there once round the ring.

Rank 0 begins each chunk with the sum of its own replicas, every further rank adds its replicas one after another, and
the last rank finishes the chunk and sends it on to 0, 1, ... Each link carries every byte at most twice; the chunks are
pipelined and both passes overlap. Whoever owns the replicas, the sum is taken in their order.

Small arrays never enter the ring: they travel with the exchange that precedes every collective, from every rank to
every other one, and each rank adds all of them itself. Arrays of medium size, and 16-bit floats of any, are cut into
one slice per rank; every rank receives the others' parts of its slice, reduces it and sends it to all, as long as this
moves no more bytes (the partial sums of 16-bit floats have 32 bits, what travels so has 16). Which arrays these are
depends on the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from collectives.errors import PeerLostError
from collectives.memory import aligned_empty
from collectives.reduction import Reduction
from collectives.ring.link import Link, Transfer
from collectives.ring.passes import EXCHANGE, RESULTS, Chunk, PartialPass, Place, ResultPass, drain
from collectives.ring.slice_pass import SlicePass
from collectives.transport import Parts, Transport
from collectives.waiting import Watch

Stage = PartialPass | ResultPass | SlicePass

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
    """

    def __init__(self, link: Link, watch: Watch) -> None:
        self.rank = link.rank
        self.size = link.size
        self.link = link
        self._place = Place(link)
        self._watch = watch
        self._sizes = link.sizes
        self._inline_bytes = link.sizes.inline_bytes
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._parity = 0
        self._inline: dict[tuple[np.dtype, int, int], list[tuple[list[np.ndarray], Parts]]] = {}
        room = _HEADER_BYTES + self._inline_bytes
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
        if self._sizes.goes_directly(out.size, reduction, parts.counts):
            piece = self._piece_elements(reduction, out.size)
            self._run([SlicePass(self._place, contributions, out, reduction, parts, piece)])
            return
        chunks = _cut(0, out.size, self._chunk_elements(reduction, out.size))
        destinations = range(self.size - 1)
        self._flow(contributions, reduction, parts, [Chunk(chunk, out[chunk], destinations) for chunk in chunks])

    def reduce_scatter(
        self, contributions: Sequence[np.ndarray], out: np.ndarray, reduction: Reduction, parts: Parts
    ) -> None:
        if self._sizes.scatters_directly(reduction, parts.counts):
            piece = self._piece_elements(reduction, out.size * self.size)
            self._run([SlicePass(self._place, contributions, out, reduction, parts, piece, hands_on=False)])
            return
        step = self._chunk_elements(reduction, out.size)
        own = self.rank * out.size
        plan = [
            Chunk(
                chunk,
                out[chunk.start - own : chunk.stop - own] if owner == self.rank else None,
                range(owner, owner + 1) if owner < self.size - 1 else range(0),
            )
            for owner in range(self.size)
            for chunk in _cut(owner * out.size, (owner + 1) * out.size, step)
        ]
        self._flow(contributions, reduction, parts, plan)

    def _complete_all(self, transfers: Sequence[tuple[Transfer, int]]) -> None:
        """Wait until all transfers, each named with its rank, are done."""
        pending = deque(transfers)
        self._watch.wait(lambda: drain(pending), lambda: sorted({rank for _, rank in pending}))

    def _piece_elements(self, reduction: Reduction, size: int) -> int:
        """The part of a slice that travels in one message: all of it, unless the array is long."""
        if size * reduction.accumulator.itemsize <= max(self._sizes.direct_bytes, self._sizes.short_bytes):
            return -(-size // self.size)
        itemsize = reduction.dtype.itemsize
        return max(1, self._sizes.chunk_of(size * itemsize) // itemsize)

    def _chunk_elements(self, reduction: Reduction, size: int) -> int:
        itemsize = reduction.accumulator.itemsize
        return max(1, self._sizes.chunk_of(size * itemsize) // itemsize)

    def _flow(
        self,
        contributions: Sequence[np.ndarray],
        reduction: Reduction,
        parts: Parts,
        plan: Sequence[Chunk],
    ) -> None:
        """Run both passes."""
        last = self.size - 1
        results = ResultPass(self._place, plan) if self.rank < last else None
        partials = PartialPass(self._place, contributions, reduction, parts, plan)
        self._run([partials] if results is None else [results, partials])

    def _run(self, stages: Sequence[Stage]) -> None:
        """Go through the given passes at the same time."""
        while stages := [stage for stage in stages if not stage.is_over]:
            if not _advance(stages):
                self._watch.wait(partial(_advance, stages), partial(_awaited, stages))

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


def _advance(stages: Sequence[Stage]) -> bool:
    """Do what can be done at once; whether anything was."""
    return any([stage.advance() for stage in stages])


def _awaited(stages: Sequence[Stage]) -> list[int]:
    """The ranks without which none of the stages can go on."""
    return sorted({rank for stage in stages for rank in stage.waits_for()})


def _cut(start: int, stop: int, step: int) -> list[slice]:
    return [slice(first, min(stop, first + step)) for first in range(start, stop, step)]
