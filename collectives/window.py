"""The shared window: the ranks of one host reduce straight from memory that all of them see.

The elements are cut into one slice per rank. Rank j reduces slice j over all replicas, in replica order; for that the
others put their part of slice j, chunk by chunk, into a small pipe in the window, which stays in the cache, and read
the finished slice in place where `out` lies in shared memory itself. A replica's gradient is so read once from where
XLA left it, and written only as far as another rank needs it.

Ranks agree through words that each has for itself in the window: one writer, many readers, values that only grow.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from collectives.memory import aligned_empty
from collectives.reduction import Reduction
from collectives.segment import share_segment
from collectives.transport import Parts, Transport
from collectives.waiting import Watch

INLINE_BYTES = 1 << 17  # what all ranks together send along with an exchange, per rank at most
PIPE_BYTES = 1 << 20  # per rank: contributions on their way to the ranks that reduce them
RESULT_BYTES = 1 << 19  # per rank: finished chunks on their way to the other ranks
DEPTH = 2  # chunks that may be under way at once
_LINE_BYTES = 64

# The words of a rank, in 8-byte units; those that belong to one exchange exist twice, by parity.
_SEQUENCE, _FINGERPRINT, _COUNT, _NBYTES = 0, 2, 4, 6
_PRODUCED, _CONSUMED, _REDUCED, _FETCHED = 8, 9, 10, 11
_WORDS = 16
_TO_COUNT, _TO_NBYTES = _COUNT - _FINGERPRINT, _NBYTES - _FINGERPRINT
_NO_PARTS = Parts((), ())
_TOO_LARGE = (1 << 64) - 1
_PLANS = 256  # cached layouts


def channel_bytes(size: int) -> int:
    """The memory that one channel between `size` ranks takes."""
    return size * (_WORDS * 8 + 2 * INLINE_BYTES + PIPE_BYTES + RESULT_BYTES)


def _make_fence() -> Callable[[], None] | None:
    """What keeps a processor from reordering stores around a flag; nothing on x86, which does not."""
    if platform.machine() in ("x86_64", "AMD64", "i686"):
        return None
    lock = threading.Lock()

    def fence() -> None:  # an atomic read-modify-write with acquire, then one with release semantics
        with lock:
            pass

    return fence


_FENCE = _make_fence()


class WindowTransport(Transport):
    """Ranks that share memory.

    Args:
        memory: at least `channel_bytes(size)` bytes, zeroed, the same for all ranks.
        rank: this rank.
        size: the number of ranks.
        watch: how to wait.
        directory: where shared memory for results is made.
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
        self._watch = watch
        self._directory = directory
        self._memory = memory
        self._words = memory[: size * _WORDS * 8].cast("Q")
        self._mine = rank * _WORDS
        self._others = [other * _WORDS for other in range(size) if other != rank]
        self._sequence = 0
        self._chunks = 0
        self._inline_bytes = INLINE_BYTES // size
        self._inline: dict[tuple[np.dtype, int, int], list[tuple[list[np.ndarray], Parts]]] = {}
        self._uniform: dict[int, Parts] = {}
        self._staging: dict[tuple[Reduction, int, int], _StagedReduction] = {}
        self._staged: _StagedReduction | None = None
        self.shares_memory = True
        self._is_pipe_free = True  # whether all other ranks are known to have read what lies in this rank's pipe

    # ---- exchange

    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        words, mine = self._words, self._mine
        sequence = self._sequence + 1
        self._sequence = sequence
        parity = sequence & 1
        nbytes = 0
        if arrays:
            first = arrays[0]
            nbytes = first.nbytes * count
            if nbytes <= self._inline_bytes:
                plan = self._inline.get((first.dtype, first.size, count)) or self._plan_inline(first, count)
                slots, parts = plan[parity]
                for slot, array in zip(slots, arrays, strict=True):
                    slot[...] = array
            else:
                nbytes = _TOO_LARGE
        words[mine + _FINGERPRINT + parity] = fingerprint
        words[mine + _COUNT + parity] = count
        words[mine + _NBYTES + parity] = nbytes
        if _FENCE:
            _FENCE()
        words[mine] = sequence
        self._await(_SEQUENCE, sequence)
        alike = True
        base = parity + _FINGERPRINT
        for other in self._others:
            first_word = other + base
            if words[first_word] != fingerprint:
                return False, _NO_PARTS
            if words[first_word + _TO_COUNT] != count or words[first_word + _TO_NBYTES] != nbytes:
                alike = False
        if alike and (not nbytes or nbytes == _TOO_LARGE):
            if count not in self._uniform:
                self._uniform[count] = Parts((count,) * self.size, ())
            return True, self._uniform[count]
        if alike:
            return True, parts
        return True, self._gather_parts(arrays, parity)

    def _plan_inline(self, like: np.ndarray, count: int) -> list[tuple[list[np.ndarray], Parts]]:
        """Views of all slots for arrays like `like`, `count` from each rank, for both parities."""
        if len(self._inline) > _PLANS:
            self._inline.clear()
        plan = []
        for parity in (0, 1):
            slots = [self._inline_slots(rank, parity, like, count) for rank in range(self.size)]
            arrays = [slot for of_rank in slots for slot in of_rank]
            plan.append((slots[self.rank], Parts((count,) * self.size, arrays)))
        self._inline[like.dtype, like.size, count] = plan
        return plan

    def _inline_slots(self, rank: int, parity: int, like: np.ndarray, count: int) -> list[np.ndarray]:
        start = self.size * _WORDS * 8 + (rank * 2 + parity) * INLINE_BYTES
        step = like.nbytes
        return [np.ndarray(like.size, like.dtype, self._memory, start + replica * step) for replica in range(count)]

    def _gather_parts(self, arrays: Sequence[np.ndarray], parity: int) -> Parts:
        """What the ranks contributed where they did not all contribute as many arrays as this one."""
        words = self._words
        ranks = range(self.size)
        counts = tuple(words[rank * _WORDS + _COUNT + parity] for rank in ranks)
        sent = [words[rank * _WORDS + _NBYTES + parity] for rank in ranks]
        if not arrays or _TOO_LARGE in sent:
            return Parts(counts, ())
        slots = [self._inline_slots(rank, parity, arrays[0], counts[rank]) for rank in ranks]
        return Parts(counts, [slot for of_rank in slots for slot in of_rank])

    def _await(self, word: int, value: int) -> None:
        """Wait until the given word of every other rank has reached `value`."""
        words = self._words
        for other in self._others:
            if words[other + word] < value:
                self._spin(other + word, value, lambda: self._behind(word, value))
        if _FENCE:
            _FENCE()

    def _await_rank(self, rank: int, word: int, value: int) -> None:
        index = rank * _WORDS + word
        if self._words[index] < value:
            self._spin(index, value, lambda: [rank])
        if _FENCE:
            _FENCE()

    def _spin(self, index: int, value: int, missing: Callable[[], Sequence[int]]) -> None:
        words = self._words
        for _ in range(self._watch.spins):
            if words[index] >= value:
                return
        self._watch.wait_patiently(lambda: words[index] >= value, missing)

    def _behind(self, word: int, value: int) -> list[int]:
        return [other // _WORDS for other in self._others if self._words[other + word] < value]

    def _announce(self, word: int, value: int) -> None:
        if _FENCE:
            _FENCE()
        self._words[self._mine + word] = value

    # ---- reductions

    def stage(self, contributions: Sequence[np.ndarray], reduction: Reduction) -> None:
        """Put what the other ranks reduce into the pipe at once, if all of it fits into one chunk."""
        first = contributions[0]
        key = (reduction, first.size, len(contributions))
        plan = self._staging.get(key)
        if plan is None:
            if len(self._staging) > _PLANS:
                self._staging.clear()
            plan = self._staging[key] = _StagedReduction.plan(self, reduction, first.size, len(contributions))
        self._staged = plan
        if plan.is_possible:
            if not self._is_pipe_free:
                self._await(_CONSUMED, self._chunks - DEPTH + 1)
                self._is_pipe_free = True
            plan.put(contributions, self._chunks)

    def reduce(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray,
        reduction: Reduction,
        parts: Parts,
        is_shared: bool = False,
    ) -> None:
        if not is_shared:
            bounds = _slice_bounds(out.size, self.size, _LINE_BYTES // out.itemsize)
            _Flow(self, reduction, parts, bounds, contributions, RESULT_BYTES).run(None, out)
            return
        staged = self._staged
        if staged is not None and staged.is_possible and parts.counts == staged.counts:
            staged.reduce(contributions, out, self._chunks)
            self._chunks += 1
            self._catch_up()
        else:
            bounds = _slice_bounds(out.size, self.size, _LINE_BYTES // out.itemsize)
            lo, hi = bounds[self.rank], bounds[self.rank + 1]
            _Flow(self, reduction, parts, bounds, contributions, PIPE_BYTES).run(out[lo:hi], None)
        self._await(_REDUCED, self._chunks)

    def reduce_scatter(self, contribution: np.ndarray, out: np.ndarray, reduction: Reduction, parts: Parts) -> None:
        self._is_pipe_free = False
        bounds = [rank * out.size for rank in range(self.size + 1)]
        _Flow(self, reduction, parts, bounds, [contribution], PIPE_BYTES).run(out, None)

    # ---- copies

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        for chunk, window in self._stream(buffer.size):
            if self.rank == root:
                self._await(_CONSUMED, chunk - DEPTH + 1)
                np.copyto(self._pipe(root, chunk, window.stop - window.start), buffer[window])
                self._announce(_PRODUCED, chunk + 1)
            else:
                self._await_rank(root, _PRODUCED, chunk + 1)
                np.copyto(buffer[window], self._pipe(root, chunk, window.stop - window.start))
                self._announce(_CONSUMED, chunk + 1)

    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out[self.rank], block)
        for chunk, window in self._stream(block.size):
            length = window.stop - window.start
            self._await(_CONSUMED, chunk - DEPTH + 1)
            np.copyto(self._pipe(self.rank, chunk, length), block[window])
            self._announce(_PRODUCED, chunk + 1)
            for rank in range(self.size):
                if rank != self.rank:
                    self._await_rank(rank, _PRODUCED, chunk + 1)
                    np.copyto(out[rank, window], self._pipe(rank, chunk, length))
            self._announce(_CONSUMED, chunk + 1)

    def _stream(self, nbytes: int) -> Iterator[tuple[int, slice]]:
        """Chunk numbers and byte ranges; afterwards all the words of this rank stand behind the last chunk."""
        step = PIPE_BYTES // DEPTH
        for start in range(0, nbytes, step):
            self._is_pipe_free = False
            yield self._chunks, slice(start, min(nbytes, start + step))
            self._chunks += 1
        self._catch_up()

    def _catch_up(self) -> None:
        """Put all the words of this rank behind the last chunk."""
        if _FENCE:
            _FENCE()
        words, mine, chunks = self._words, self._mine, self._chunks
        words[mine + _PRODUCED] = chunks
        words[mine + _CONSUMED] = chunks
        words[mine + _FETCHED] = chunks
        words[mine + _REDUCED] = chunks

    def _pipe(self, rank: int, chunk: int, length: int) -> np.ndarray:
        start = self._pipe_start(rank) + chunk % DEPTH * (PIPE_BYTES // DEPTH)
        return np.ndarray(length, np.uint8, self._memory, start)

    def _pipe_start(self, rank: int) -> int:
        return self.size * (_WORDS * 8 + 2 * INLINE_BYTES) + rank * (PIPE_BYTES + RESULT_BYTES)

    # ---- memory

    def allocate(self, nbytes: int) -> np.ndarray:
        segment = share_segment(self, max(1, nbytes), self._directory) if self.shares_memory else None
        if segment is None:  # no room: every rank gets private memory, and so does every later call
            self.shares_memory = False
            return aligned_empty(nbytes)
        return np.frombuffer(segment, np.uint8)[:nbytes]

    def close(self) -> None:
        self._inline.clear()
        self._staging.clear()
        self._words.release()


class _Flow:
    """One reduction on its way through the window, chunk by chunk."""

    def __init__(
        self,
        window: WindowTransport,
        reduction: Reduction,
        parts: Parts,
        bounds: Sequence[int],
        contributions: Sequence[np.ndarray],
        chunk_bytes: int,
    ) -> None:
        self._window = window
        self._reduction = reduction
        self._parts = parts
        self._bounds = bounds
        self._contributions = contributions
        self._chunk_bytes = chunk_bytes // DEPTH
        longest = max(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
        self._chunk = self._chunk_elements()
        self._steps = -(-longest // self._chunk)

    def run(self, own: np.ndarray | None, everything: np.ndarray | None) -> None:
        """Reduce; the own slice goes into `own`, or all slices into `everything`."""
        window = self._window
        base = window._chunks
        for step in range(self._steps):
            chunk = base + step
            window._await(_CONSUMED, chunk - DEPTH + 1)
            self._produce(step, chunk)
            window._announce(_PRODUCED, chunk + 1)
            if everything is not None:
                window._await(_FETCHED, chunk - DEPTH + 1)
            window._await(_PRODUCED, chunk + 1)
            self._reduce(step, chunk, own, everything)
            window._announce(_CONSUMED, chunk + 1)
            window._announce(_REDUCED, chunk + 1)
            if everything is not None:
                self._fetch(step, chunk, everything)
                window._announce(_FETCHED, chunk + 1)
        window._chunks = base + self._steps
        window._catch_up()

    def _chunk_elements(self) -> int:
        """The largest chunk of which every rank's contributions fit the pipe, within the given size."""
        ranks = range(self._window.size)
        per_element = max(self._arrays_of(rank) * self._dtype_of(rank).itemsize for rank in ranks)
        of_pipe = PIPE_BYTES // DEPTH // (max(1, self._window.size - 1) * per_element)
        elements = min(of_pipe, self._chunk_bytes // self._reduction.dtype.itemsize)
        return max(1, elements // _LINE_BYTES * _LINE_BYTES)

    def _arrays_of(self, rank: int) -> int:
        """The arrays that a rank puts into its pipe: its replicas', or the sum that starts with replica 0."""
        return 1 if rank == 0 else self._parts.counts[rank]

    def _dtype_of(self, rank: int) -> np.dtype:
        return self._reduction.accumulator if rank == 0 else self._reduction.dtype

    def _range(self, rank: int, step: int) -> tuple[int, int]:
        start = self._bounds[rank] + step * self._chunk
        return start, max(start, min(self._bounds[rank + 1], start + self._chunk))

    def _piped(self, rank: int, owner: int, chunk: int, length: int) -> list[np.ndarray]:
        """The places in the pipe of `rank` for what `owner` will reduce."""
        arrays, dtype = self._arrays_of(rank), self._dtype_of(rank)
        place = owner - (owner > rank)
        start = self._window._pipe_start(rank) + chunk % DEPTH * (PIPE_BYTES // DEPTH)
        start += place * arrays * self._chunk * dtype.itemsize
        memory, step = self._window._memory, self._chunk * dtype.itemsize
        return [np.ndarray(length, dtype, memory, start + number * step) for number in range(arrays)]

    def _places_for(self, owner: int, step: int, chunk: int) -> list[np.ndarray]:
        start, stop = self._range(owner, step)
        return self._piped(self._window.rank, owner, chunk, stop - start)

    def _places_of(self, rank: int, step: int, chunk: int) -> list[np.ndarray]:
        start, stop = self._range(self._window.rank, step)
        return self._piped(rank, self._window.rank, chunk, stop - start)

    def _produce(self, step: int, chunk: int) -> None:
        rank = self._window.rank
        for owner in range(self._window.size):
            if owner == rank:
                continue
            start, stop = self._range(owner, step)
            if start == stop:
                continue
            places = self._places_for(owner, step, chunk)
            mine = [contribution[start:stop] for contribution in self._contributions]
            if rank == 0:
                self._reduction.fold(mine, places[0])
            else:
                for place, part in zip(places, mine, strict=True):
                    np.copyto(place, part)

    def _reduce(self, step: int, chunk: int, own: np.ndarray | None, everything: np.ndarray | None) -> None:
        window = self._window
        start, stop = self._range(window.rank, step)
        if start == stop:
            return
        sources: list[np.ndarray] = []
        for rank in range(window.size):
            if rank == window.rank:
                sources += [contribution[start:stop] for contribution in self._contributions]
            else:
                sources += self._places_of(rank, step, chunk)
        if everything is not None:
            target = everything[start:stop]
        else:
            assert own is not None
            offset = self._bounds[window.rank]
            target = own[start - offset : stop - offset]
        self._reduction.reduce(sources, target, self._parts.total)
        if everything is not None:
            np.copyto(self._result(window.rank, chunk, stop - start), target)

    def _fetch(self, step: int, chunk: int, everything: np.ndarray) -> None:
        for rank in range(self._window.size):
            start, stop = self._range(rank, step)
            if rank == self._window.rank or start == stop:
                continue
            self._window._await_rank(rank, _REDUCED, chunk + 1)
            np.copyto(everything[start:stop], self._result(rank, chunk, stop - start))

    def _result(self, rank: int, chunk: int, length: int) -> np.ndarray:
        start = self._window._pipe_start(rank) + PIPE_BYTES + chunk % DEPTH * (RESULT_BYTES // DEPTH)
        return np.ndarray(length, self._reduction.dtype, self._window._memory, start)


class _StagedReduction:
    """A reduction into shared memory that takes one chunk: all its places are known before the ranks agree.

    Attributes:
        is_possible: whether it fits one chunk.
        counts: the contributions of all ranks for which it was planned: the same number from each.
    """

    def __init__(self, window: WindowTransport, reduction: Reduction, bounds: Sequence[int], count: int) -> None:
        self.counts = (count,) * window.size
        self._window = window
        self._reduction = reduction
        self._own = slice(bounds[window.rank], bounds[window.rank + 1])
        self._total = count * window.size
        self._puts: list[list[tuple[slice, list[np.ndarray]]]] = []
        self._sources: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        parts = Parts(self.counts, ())
        flow = _Flow(window, reduction, parts, bounds, [], PIPE_BYTES)
        self.is_possible = flow._steps == 1
        if not self.is_possible:
            return
        ranks = range(window.size)
        for parity in range(DEPTH):
            self._puts.append(
                [
                    (slice(*flow._range(owner, 0)), flow._places_for(owner, 0, parity))
                    for owner in ranks
                    if owner != window.rank
                ]
            )
            before = [place for rank in ranks[: window.rank] for place in flow._places_of(rank, 0, parity)]
            after = [place for rank in ranks[window.rank + 1 :] for place in flow._places_of(rank, 0, parity)]
            self._sources.append((before, after))

    @classmethod
    def plan(cls, window: WindowTransport, reduction: Reduction, elements: int, count: int) -> _StagedReduction:
        """The places for `count` contributions of `elements` elements from each rank."""
        bounds = _slice_bounds(elements, window.size, _LINE_BYTES // reduction.dtype.itemsize)
        return cls(window, reduction, bounds, count)

    def put(self, contributions: Sequence[np.ndarray], chunk: int) -> None:
        """Put what the other ranks reduce into the pipe."""
        for part, places in self._puts[chunk % DEPTH]:
            if len(contributions) == 1:
                places[0][...] = contributions[0][part]
            elif self._window.rank == 0:
                self._reduction.fold([array[part] for array in contributions], places[0])
            else:
                for place, array in zip(places, contributions, strict=True):
                    place[...] = array[part]

    def reduce(self, contributions: Sequence[np.ndarray], out: np.ndarray, chunk: int) -> None:
        """Reduce the own slice."""
        before, after = self._sources[chunk % DEPTH]
        own = self._own
        if len(contributions) == 1:
            sources = [*before, contributions[0][own], *after]
        else:
            sources = [*before, *[array[own] for array in contributions], *after]
        self._reduction.reduce(sources, out[own], self._total)


def _slice_bounds(elements: int, size: int, alignment: int) -> list[int]:
    """The borders of one slice per rank, as equal as whole cache lines allow."""
    lines = -(-elements // alignment)
    lengths = [lines // size + (rank < lines % size) for rank in range(size)]
    return [min(elements, lines * alignment) for lines in accumulate(lengths, initial=0)]
