"""Reductions through a window that the native kernel carries out, each prepared for arrays of one layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from collectives import collective_ops
from collectives.agreement import raise_mismatch
from collectives.buffers import flat_view
from collectives.calls import Call
from collectives.kernel import Kernel, NativePlan
from collectives.reduction import order_of
from collectives.shared_memory.reduction import ChunkedReduction, slice_bounds
from collectives.shared_memory.segment import (
    DEPTH,
    LINE_BYTES,
    PIPE_BYTES,
    RESULT_BYTES,
    STAGED,
    TOO_LARGE,
    Window,
    inline_start,
    pipe_start,
)
from collectives.transport import Parts, Prepared, Reducing, Transport


class Exchanging(Protocol):
    """The exchanges of a transport, as a prepared reduction makes them."""

    window: Window

    def begin_exchange(self) -> int:
        """Return the number of a new exchange."""

    def compare(self, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        """Return the result of the exchange for which all ranks have come."""


@dataclass(frozen=True)
class PreparedLayout:
    """A reduction, apart from the memory of its arrays.

    Attributes:
        call: Call that all ranks make.
        reducing: An equal reduction.
        shape: Shape of the result.
        counts: Number of contributions of each rank.
    """

    call: Call
    reducing: Reducing
    shape: tuple[int, ...]
    counts: tuple[int, ...]

    def announced(self, inline_bytes: int, is_one_chunk: bool) -> list[int]:
        """Return what each rank announces as the size of its arrays."""
        if self.reducing.is_shared:
            is_staged = is_one_chunk and len(set(self.counts)) == 1
            return [STAGED if is_staged else 0] * len(self.counts)
        sizes = [count * self.reducing.out.nbytes for count in self.counts]
        return [size if size <= inline_bytes else TOO_LARGE for size in sizes]


def native_plan(
    kernel: Kernel, window: Window, layout: PreparedLayout, inline_bytes: int
) -> tuple[NativePlan, int] | None:
    """Return a plan of the native kernel, and the number of chunks that pass through the window.

    Return None if some ranks' arrays travel with the exchange, and others' do not, or if there are too many.
    """
    reducing, counts, size = layout.reducing, layout.counts, window.size
    out, reduction = reducing.out, reducing.reduction
    bounds = slice_bounds(out.size, size, LINE_BYTES // out.itemsize)
    chunk_bytes = PIPE_BYTES if reducing.is_shared else RESULT_BYTES
    flow = ChunkedReduction(window, reduction, Parts(counts, ()), bounds, [], chunk_bytes)
    nbytes = layout.announced(inline_bytes, flow.steps == 1)
    kinds = {kernel.CHUNKED if each in (0, TOO_LARGE) else kernel.INLINE for each in nbytes}
    if STAGED in nbytes:
        kinds = {kernel.STAGED}
    leaves = order_of(sum(counts))
    if len(kinds) > 1 or leaves.rows > kernel.MOST_ROWS:
        return None
    [kind] = kinds
    first = flow.spread.blocks[window.rank].first
    own = flow.spread.sums[window.rank]
    plan = kernel.Plan(
        window=window.native,
        kind=kind,
        format=out.dtype.char,
        shape=layout.shape,
        is_private=not reducing.is_shared,
        fingerprint=layout.call.fingerprint,
        mean=sum(counts) if reduction.op == "mean" else 0,
        counts=_table(counts),
        nbytes=_table(nbytes),
        bounds=_table(bounds),
        slots=_table([inline_start(size, rank, parity) for parity in range(DEPTH) for rank in range(size)]),
        pipes=_table([pipe_start(size, rank) for rank in range(size)]),
        nodes=_table([len(nodes) for nodes in flow.spread.sums]),
        chunk=flow.chunk,
        chunks=flow.steps,
        pipe_step=PIPE_BYTES // DEPTH,
        results=PIPE_BYTES,
        result_step=RESULT_BYTES // DEPTH,
        sums=tuple((node.first - first, order_of(node.stop - node.first).steps) for node in own),
        whole=flow.order.steps,
        leaves=leaves.steps,
        with_sums=kind == kernel.INLINE and max(counts) > 1,
    )
    return plan, 0 if kind == kernel.INLINE else flow.steps


def _table(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, np.uint64).tobytes()


@final
class PreparedReduction:
    """A `Prepared` reduction through a window."""

    def __init__(
        self, exchanging: Exchanging, kernel: Kernel, layout: PreparedLayout, plan: NativePlan, chunks: int
    ) -> None:
        self.call = layout.call
        self.is_of_use = True
        self.take: Callable[[Sequence[np.ndarray], np.ndarray], bool] = plan.take
        self.drop = plan.drop
        self._exchanging = exchanging
        self._window = exchanging.window
        # Not the layout itself: it would keep the arrays of the first call alive.
        self._reduction, self._is_shared = layout.reducing.reduction, layout.reducing.is_shared
        self._plan = plan
        self._run = plan.run
        self._chunks = chunks
        self._done = kernel.DONE

    def is_apart(self, group: Sequence[Prepared]) -> bool:
        """Return whether the result shares no memory with the arrays of other members of the group."""
        plans = [each._plan for each in group if isinstance(each, PreparedReduction)]
        return len(plans) == len(group) and self._plan.is_apart(plans)

    def carry_out(self, transport: Transport, moves: Callable[[int], None] | None = None) -> None:
        """Carry out the call whose arrays were taken."""
        window = self._window
        if self._run(self._exchanging.begin_exchange(), window.chunks, moves) == self._done:
            window.chunks += self._chunks
        else:
            self._end_unprepared(transport, moves)

    def _end_unprepared(self, transport: Transport, moves: Callable[[int], None] | None) -> None:
        """Continue after an exchange in which other ranks made other calls, or contributed other numbers of arrays."""
        *contributions, out = [flat_view(array) for array in self._plan.taken()]
        self.drop()
        carried = [] if self._is_shared else contributions
        equal, parts = self._exchanging.compare(carried, len(contributions))
        if not equal:
            raise_mismatch(transport, self.call)
        self.is_of_use = False
        if moves is not None:
            moves(self.call.nbytes)
        collective_ops.reduce(
            transport, parts, Reducing(contributions, out, self._reduction, is_shared=self._is_shared)
        )
