"""Reductions through shared memory: in chunks, or staged in advance if one chunk is enough.

Each rank reduces one slice. The other ranks pass their partial sums of it: the largest nodes of the tree inside their
blocks of replicas (`collectives.tree`). If the blocks are aligned, that is one node per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from collectives.plans.spread import Spread
from collectives.reduction import Reduction, order_of
from collectives.shared_memory.segment import (
    CONSUMED,
    DEPTH,
    FETCHED,
    LINE_BYTES,
    PIPE_BYTES,
    PRODUCED,
    REDUCED,
    RESULT_BYTES,
    Window,
    pipe_start,
)
from collectives.transport import Parts
from collectives.tree import TreeNode


class ChunkedReduction:
    """One reduction in progress through the window, chunk by chunk.

    Attributes:
        spread: Spread of the contributions over the ranks.
        order: Order in which this rank adds.
        chunk: Number of elements of each slice in a chunk.
        steps: Number of chunks.
    """

    def __init__(
        self,
        window: Window,
        reduction: Reduction,
        parts: Parts,
        bounds: Sequence[int],
        contributions: Sequence[np.ndarray],
        chunk_bytes: int,
    ) -> None:
        self._window = window
        self._reduction = reduction
        self.spread = spread_of(parts.counts)
        self._dtypes = [[reduction.dtype_of(node) for node in nodes] for nodes in self.spread.sums]
        self.order = order_of(nodes_seen_by(self.spread, window.rank))
        self._bounds = bounds
        self._contributions = contributions
        self._chunk_bytes = chunk_bytes // DEPTH
        longest = max(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
        self.chunk = self._chunk_elements()
        self.steps = -(-longest // self.chunk)

    def run(self, own: np.ndarray | None, everything: np.ndarray | None) -> None:
        """Run the reduction; store this rank's slice in `own`, or all slices in `everything`."""
        window = self._window
        base = window.chunks
        for step in range(self.steps):
            chunk = base + step
            window.await_all(CONSUMED, chunk - DEPTH + 1)
            self._produce(step, chunk)
            window.announce(PRODUCED, chunk + 1)
            if everything is not None:
                window.await_all(FETCHED, chunk - DEPTH + 1)
            window.await_all(PRODUCED, chunk + 1)
            self._reduce(step, chunk, own, everything)
            window.announce(CONSUMED, chunk + 1)
            window.announce(REDUCED, chunk + 1)
            if everything is not None:
                self._fetch(step, chunk, everything)
                window.announce(FETCHED, chunk + 1)
        window.chunks = base + self.steps
        window.catch_up()

    def _chunk_elements(self) -> int:
        """Return the largest chunk whose contributions fit into every rank's pipe, within the given size."""
        per_element = max(sum(dtype.itemsize for dtype in dtypes) for dtypes in self._dtypes)
        of_pipe = PIPE_BYTES // DEPTH // (max(1, self._window.size - 1) * per_element)
        elements = min(of_pipe, self._chunk_bytes // self._reduction.dtype.itemsize)
        return max(1, elements // LINE_BYTES * LINE_BYTES)

    def range_of(self, rank: int, step: int) -> tuple[int, int]:
        """Return the element range of a rank's slice that is reduced in one step."""
        start = self._bounds[rank] + step * self.chunk
        return start, max(start, min(self._bounds[rank + 1], start + self.chunk))

    def _piped(self, rank: int, owner: int, chunk: int, length: int) -> list[np.ndarray]:
        """Return the arrays in the pipe of `rank` that hold its partial sums for `owner`, in order."""
        dtypes = self._dtypes[rank]
        steps = [self.chunk * dtype.itemsize for dtype in dtypes]
        place = owner - (owner > rank)
        start = pipe_start(self._window.size, rank) + chunk % DEPTH * (PIPE_BYTES // DEPTH) + place * sum(steps)
        starts = accumulate(steps, initial=start)
        return [
            np.ndarray(length, dtype, self._window.memory, first) for dtype, first in zip(dtypes, starts, strict=False)
        ]

    def places_for(self, owner: int, step: int, chunk: int) -> list[np.ndarray]:
        """Return the arrays into which this rank writes its partial sums for `owner`."""
        start, stop = self.range_of(owner, step)
        return self._piped(self._window.rank, owner, chunk, stop - start)

    def places_of(self, rank: int, step: int, chunk: int) -> list[np.ndarray]:
        """Return the arrays into which `rank` has written its partial sums for this rank."""
        start, stop = self.range_of(self._window.rank, step)
        return self._piped(rank, self._window.rank, chunk, stop - start)

    def _produce(self, step: int, chunk: int) -> None:
        rank = self._window.rank
        for owner in range(self._window.size):
            if owner == rank:
                continue
            start, stop = self.range_of(owner, step)
            if start == stop:
                continue
            places = self.places_for(owner, step, chunk)
            put_sums(self._reduction, self.spread, rank, [array[start:stop] for array in self._contributions], places)

    def _reduce(self, step: int, chunk: int, own: np.ndarray | None, everything: np.ndarray | None) -> None:
        window = self._window
        start, stop = self.range_of(window.rank, step)
        if start == stop:
            return
        sources: list[np.ndarray] = []
        for rank in range(window.size):
            if rank == window.rank:
                sources += [contribution[start:stop] for contribution in self._contributions]
            else:
                sources += self.places_of(rank, step, chunk)
        if everything is not None:
            target = everything[start:stop]
        else:
            assert own is not None
            offset = self._bounds[window.rank]
            target = own[start - offset : stop - offset]
        self._reduction.reduce(sources, target, self.spread.replicas, self.order)
        if everything is not None:
            np.copyto(self._result(window.rank, chunk, stop - start), target)

    def _fetch(self, step: int, chunk: int, everything: np.ndarray) -> None:
        for rank in range(self._window.size):
            start, stop = self.range_of(rank, step)
            if rank == self._window.rank or start == stop:
                continue
            self._window.await_rank(rank, REDUCED, chunk + 1)
            np.copyto(everything[start:stop], self._result(rank, chunk, stop - start))

    def _result(self, rank: int, chunk: int, length: int) -> np.ndarray:
        start = pipe_start(self._window.size, rank) + PIPE_BYTES + chunk % DEPTH * (RESULT_BYTES // DEPTH)
        return np.ndarray(length, self._reduction.dtype, self._window.memory, start)


class StagedReduction:
    """A reduction of one chunk into shared memory: all its places are known before the ranks agree.

    Attributes:
        is_possible: Whether one chunk is enough.
        elements: Size of the arrays that were planned.
        count: Number of arrays that each rank contributes.
    """

    def __init__(self, window: Window, reduction: Reduction, elements: int, count: int) -> None:
        bounds = slice_bounds(elements, window.size, LINE_BYTES // reduction.dtype.itemsize)
        self.elements = elements
        self.count = count
        counts = (count,) * window.size
        self._window = window
        self._reduction = reduction
        self._spread = spread_of(counts)
        self._order = order_of(nodes_seen_by(self._spread, window.rank))
        self._own = slice(bounds[window.rank], bounds[window.rank + 1])
        self._total = count * window.size
        self._puts: list[list[tuple[slice, list[np.ndarray]]]] = []
        self._sources: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        parts = Parts(counts, ())
        flow = ChunkedReduction(window, reduction, parts, bounds, [], PIPE_BYTES)
        self.is_possible = flow.steps == 1
        if not self.is_possible:
            return
        ranks = range(window.size)
        for parity in range(DEPTH):
            self._puts.append(
                [
                    (slice(*flow.range_of(owner, 0)), flow.places_for(owner, 0, parity))
                    for owner in ranks
                    if owner != window.rank
                ]
            )
            before = [place for rank in ranks[: window.rank] for place in flow.places_of(rank, 0, parity)]
            after = [place for rank in ranks[window.rank + 1 :] for place in flow.places_of(rank, 0, parity)]
            self._sources.append((before, after))

    def put(self, contributions: Sequence[np.ndarray], chunk: int) -> None:
        """Write this rank's partial sums for all other ranks into the pipe."""
        for part, places in self._puts[chunk % DEPTH]:
            if len(contributions) == 1:
                places[0][...] = contributions[0][part]
                continue
            mine = [array[part] for array in contributions]
            if len(places) == 1:
                self._reduction.fold(mine, places[0])
            else:
                put_sums(self._reduction, self._spread, self._window.rank, mine, places)

    def reduce(self, contributions: Sequence[np.ndarray], out: np.ndarray, chunk: int) -> None:
        """Reduce this rank's slice into `out`."""
        before, after = self._sources[chunk % DEPTH]
        own = self._own
        if len(contributions) == 1:
            sources = [*before, contributions[0][own], *after]
        else:
            sources = [*before, *[array[own] for array in contributions], *after]
        self._reduction.reduce(sources, out[own], self._total, self._order)


def slice_bounds(elements: int, size: int, alignment: int) -> list[int]:
    """Return the bounds of one slice per rank, as equal as whole cache lines allow."""
    lines = -(-elements // alignment)
    lengths = [lines // size + (rank < lines % size) for rank in range(size)]
    return [min(elements, lines * alignment) for lines in accumulate(lengths, initial=0)]


@lru_cache(256)
def spread_of(counts: tuple[int, ...]) -> Spread:
    """Return the spread of ranks on one host with the given numbers of contributions."""
    return Spread.together(counts)


@lru_cache(1024)
def nodes_seen_by(spread: Spread, rank: int) -> tuple[TreeNode, ...]:
    """Return the nodes that a rank adds, in order: its own leaves, and the other ranks' partial sums around them."""
    others = [spread.sums[other] for other in range(spread.size)]
    others[rank] = spread.leaves(rank)
    return tuple(node for nodes in others for node in nodes)


def put_sums(
    reduction: Reduction, spread: Spread, rank: int, contributions: Sequence[np.ndarray], places: Sequence[np.ndarray]
) -> None:
    """Add up the largest nodes inside this rank's block, each into its place."""
    if len(contributions) == 1:
        np.copyto(places[0], contributions[0])
        return
    first = spread.blocks[rank].first
    for node, place in zip(spread.sums[rank], places, strict=True):
        reduction.fold(contributions[node.first - first : node.stop - first], place)
