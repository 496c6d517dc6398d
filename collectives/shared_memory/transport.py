"""Collectives through shared memory: the ranks of one host reduce data that all of them can read.

The elements are cut into one slice per rank. Rank j reduces slice j over all replicas, in the order of the tree. The
other ranks write their partial sums of slice j into small pipes in the window, chunk by chunk, so that the data stays
in the cache. If `out` is shared memory, all ranks read the finished slices in place. So a replica's gradient is read
once from XLA's buffer, and partial sums are written only for other ranks.

Ranks agree through words in the window. Each word has one writer and many readers, and its value only grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from typing_extensions import override

from collectives.arrays import aligned_empty
from collectives.caches import BoundedCache
from collectives.calls import Call
from collectives.kernel import kernel
from collectives.shared_memory.prepared import PreparedLayout, PreparedReduction, native_plan
from collectives.shared_memory.reduction import ChunkedReduction, slice_bounds
from collectives.shared_memory.segment import (
    CONSUMED,
    COUNT,
    DEPTH,
    FINGERPRINT,
    INLINE_BYTES,
    LINE_BYTES,
    NBYTES,
    PIPE_BYTES,
    PRODUCED,
    REDUCED,
    RESULT_BYTES,
    SEQUENCE,
    STAGED,
    TOO_LARGE,
    WORDS,
    Window,
    inline_start,
    pipe_start,
    share_segment,
)
from collectives.transport import Parts, Reducing, Transport
from collectives.waiting import Watch

_TO_COUNT, _TO_NBYTES = COUNT - FINGERPRINT, NBYTES - FINGERPRINT
_NO_PARTS = Parts((), ())


class SharedMemoryTransport(Transport):
    """A transport between ranks that share memory.

    Args:
        memory: Zeroed memory of at least `channel_bytes(size)` bytes, shared by all ranks.
        rank: This rank.
        size: Number of ranks.
        watch: Limits and messages of waits.
        directory: Directory of the shared memory for results.

    Attributes:
        window: Words of the ranks and their progress.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        watch: Watch,
        directory: Path,
    ) -> None:
        self.rank = rank
        self.size = size
        self._directory = directory
        self.window = window = Window(memory, rank, size, watch)
        self._words, self._mine, self._others = window.words, window.mine, window.others
        self._sequence = 0
        self._inline_bytes = INLINE_BYTES // size
        self._inline: BoundedCache[tuple[np.dtype, int, int], list[tuple[list[np.ndarray], Parts]]] = BoundedCache()
        self._uniform: dict[int, Parts] = {}
        self.shares_memory = True
        self.window_bytes = memory.nbytes
        self.prepares_reductions = window.native is not None

    # ---- exchange

    @override
    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        words, mine = self._words, self._mine
        self._sequence = sequence = self._sequence + 1
        parity = sequence & 1
        nbytes = 0
        if arrays:
            first = arrays[0]
            nbytes = first.nbytes * count
            if nbytes <= self._inline_bytes:
                for slot, array in zip(self._inline_plan(first, count)[parity][0], arrays, strict=True):
                    slot[...] = array
            else:
                nbytes = TOO_LARGE
        words[mine + FINGERPRINT + parity] = fingerprint
        words[mine + COUNT + parity] = count
        words[mine + NBYTES + parity] = nbytes
        self.window.announce(SEQUENCE, sequence)
        self.window.await_all(SEQUENCE, sequence)
        return self.compare(arrays, count)

    def begin_exchange(self) -> int:
        """Return the number of a new exchange."""
        self._sequence += 1
        return self._sequence

    def compare(self, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        """Return the result of the exchange for which all ranks have come; the arguments are those of `exchange`."""
        words, mine, parity = self._words, self._mine, self._sequence & 1
        base = parity + FINGERPRINT
        fingerprint, nbytes = words[mine + base], words[mine + base + _TO_NBYTES]
        alike = True
        for other in self._others:
            first_word = other + base
            if words[first_word] != fingerprint:
                return False, _NO_PARTS
            if words[first_word + _TO_COUNT] != count or words[first_word + _TO_NBYTES] != nbytes:
                alike = False
        if not alike:
            return True, self._gather_parts(arrays, parity)
        if nbytes in (0, STAGED, TOO_LARGE):
            return True, self._uniform.get(count) or self._plan_uniform(count)
        return True, self._inline_plan(arrays[0], count)[parity][1]

    def _plan_uniform(self, count: int) -> Parts:
        parts = self._uniform[count] = Parts((count,) * self.size, ())
        return parts

    def _inline_plan(self, like: np.ndarray, count: int) -> list[tuple[list[np.ndarray], Parts]]:
        """Return views of all slots for `count` arrays like `like` from each rank, for odd and even exchanges."""
        found = self._inline.get((like.dtype, like.size, count))
        if found is not None:
            return found
        plan = []
        for parity in (0, 1):
            slots = [self._inline_slots(rank, parity, like, count) for rank in range(self.size)]
            arrays = [slot for of_rank in slots for slot in of_rank]
            plan.append((slots[self.rank], Parts((count,) * self.size, arrays)))
        self._inline[like.dtype, like.size, count] = plan
        return plan

    def _inline_slots(self, rank: int, parity: int, like: np.ndarray, count: int) -> list[np.ndarray]:
        start = inline_start(self.size, rank, parity)
        step = like.nbytes
        memory = self.window.memory
        return [np.ndarray(like.size, like.dtype, memory, start + replica * step) for replica in range(count)]

    def _gather_parts(self, arrays: Sequence[np.ndarray], parity: int) -> Parts:
        """Return the contributions if the ranks' numbers or sizes of arrays differ."""
        words = self._words
        ranks = range(self.size)
        counts = self._counts()
        sent = [words[rank * WORDS + NBYTES + parity] for rank in ranks]
        if not arrays or TOO_LARGE in sent:
            return Parts(counts, ())
        slots = [self._inline_slots(rank, parity, arrays[0], counts[rank]) for rank in ranks]
        return Parts(counts, [slot for of_rank in slots for slot in of_rank])

    def _counts(self) -> tuple[int, ...]:
        """Return the number of arrays of each rank in the last exchange."""
        first = COUNT + (self._sequence & 1)
        return tuple(self._words[rank * WORDS + first] for rank in range(self.size))

    # ---- reductions

    @override
    def prepared(self, call: Call, reducing: Reducing, out: np.ndarray) -> PreparedReduction | None:
        found = kernel()
        if found is None or not reducing.reduction.is_native or not out.size:
            return None
        layout = PreparedLayout(call, reducing, out.shape, self._counts())
        plan = native_plan(found, self.window, layout, self._inline_bytes)
        return plan and PreparedReduction(self, found, layout, *plan)

    @override
    def reduce(self, reducing: Reducing, parts: Parts) -> None:
        contributions, out, reduction, scatters, is_shared = reducing
        if scatters:
            bounds = [rank * out.size for rank in range(self.size + 1)]
            ChunkedReduction(self.window, reduction, parts, bounds, contributions, PIPE_BYTES).run(out, None)
            return
        bounds = slice_bounds(out.size, self.size, LINE_BYTES // out.itemsize)
        if not is_shared:
            ChunkedReduction(self.window, reduction, parts, bounds, contributions, RESULT_BYTES).run(None, out)
            return
        own = out[bounds[self.rank] : bounds[self.rank + 1]]
        ChunkedReduction(self.window, reduction, parts, bounds, contributions, PIPE_BYTES).run(own, None)
        self.window.await_all(REDUCED, self.window.chunks)

    # ---- copies

    @override
    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        if self.rank == root:
            self._copy(buffer.size, buffer, [])
        else:
            self._copy(buffer.size, None, [(root, buffer)])

    @override
    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out[self.rank], block)
        self._copy(block.size, block, self._from_others(out))

    @override
    def shift(self, block: np.ndarray, out: np.ndarray, distance: int) -> None:
        self._copy(block.size, block, [((self.rank + distance) % self.size, out)])

    @override
    def gather(self, block: np.ndarray, out: np.ndarray | None, root: int) -> None:
        if out is None:
            self._copy(block.size, block, [])
        else:
            np.copyto(out[root], block)
            self._copy(block.size, None, self._from_others(out))

    def _from_others(self, out: np.ndarray) -> list[tuple[int, np.ndarray]]:
        return [(rank, out[rank]) for rank in range(self.size) if rank != self.rank]

    def _copy(self, nbytes: int, sent: np.ndarray | None, received: Sequence[tuple[int, np.ndarray]]) -> None:
        """Put a block into this rank's pipe, and take the blocks of other ranks out of theirs, in chunks.

        Args:
            nbytes: Size of each block; equal on all ranks.
            sent: Block of this rank; None if no rank takes one from here.
            received: Ranks whose blocks are taken, and where each block goes.
        """
        for chunk, part in self._stream(nbytes):
            length = part.stop - part.start
            if sent is not None:
                self.window.await_all(CONSUMED, chunk - DEPTH + 1)
                np.copyto(self._pipe(self.rank, chunk, length), sent[part])
                self.window.announce(PRODUCED, chunk + 1)
            for rank, out in received:
                self.window.await_rank(rank, PRODUCED, chunk + 1)
                np.copyto(out[part], self._pipe(rank, chunk, length))
            self.window.announce(CONSUMED, chunk + 1)

    def _stream(self, nbytes: int) -> Iterator[tuple[int, slice]]:
        """Yield chunk numbers and byte ranges; afterwards set all progress words to the number of passed chunks."""
        step = PIPE_BYTES // DEPTH
        for start in range(0, nbytes, step):
            yield self.window.chunks, slice(start, min(nbytes, start + step))
            self.window.chunks += 1
        self.window.catch_up()

    def _pipe(self, rank: int, chunk: int, length: int) -> np.ndarray:
        start = pipe_start(self.size, rank) + chunk % DEPTH * (PIPE_BYTES // DEPTH)
        return np.ndarray(length, np.uint8, self.window.memory, start)

    # ---- memory

    @override
    def allocate(self, nbytes: int) -> np.ndarray:
        segment = share_segment(self, max(1, nbytes), self._directory) if self.shares_memory else None
        if segment is None:  # no room: from now on every rank gets private memory
            self.shares_memory = False
            return aligned_empty(nbytes)
        return np.frombuffer(segment, np.uint8)[:nbytes]

    @override
    def close(self) -> None:
        self._inline.clear()
        self.window.close()
