"""Reductions through shared memory, chunk by chunk.

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

    def _range_of(self, rank: int, step: int) -> tuple[int, int]:
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

    def _produce(self, step: int, chunk: int) -> None:
        rank = self._window.rank
        for owner in range(self._window.size):
            if owner == rank:
                continue
            start, stop = self._range_of(owner, step)
            if start == stop:
                continue
            places = self._piped(rank, owner, chunk, stop - start)
            put_sums(self._reduction, self.spread, rank, [array[start:stop] for array in self._contributions], places)

    def _reduce(self, step: int, chunk: int, own: np.ndarray | None, everything: np.ndarray | None) -> None:
        window = self._window
        start, stop = self._range_of(window.rank, step)
        if start == stop:
            return
        sources: list[np.ndarray] = []
        for rank in range(window.size):
            if rank == window.rank:
                sources += [contribution[start:stop] for contribution in self._contributions]
            else:
                sources += self._piped(rank, window.rank, chunk, stop - start)
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
            start, stop = self._range_of(rank, step)
            if rank == self._window.rank or start == stop:
                continue
            self._window.await_rank(rank, REDUCED, chunk + 1)
            np.copyto(everything[start:stop], self._result(rank, chunk, stop - start))

    def _result(self, rank: int, chunk: int, length: int) -> np.ndarray:
        start = pipe_start(self._window.size, rank) + PIPE_BYTES + chunk % DEPTH * (RESULT_BYTES // DEPTH)
        return np.ndarray(length, self._reduction.dtype, self._window.memory, start)


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
