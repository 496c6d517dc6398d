"""The communicator: the collectives as programs call them, over whatever transport."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from collectives import finishing
from collectives.agreement import agree
from collectives.buffers import (
    flat_contributions,
    flat_view,
    new_call,
    refuse_overlaps_in_group,
    refuse_partial_overlap,
    result_array,
)
from collectives.calls import CLOSE, Call, checked_root
from collectives.errors import (
    BrokenError,
    BusyError,
    ClosedError,
    LayoutMismatchError,
    UnsupportedBufferError,
)
from collectives.named import Handle, NamedQueue
from collectives.reduction import Reduction
from collectives.transport import Transport
from collectives.waiting import NoProgress, Progress, Watch

logger = logging.getLogger(__name__)

Finish = Callable[..., Any]  # (transport, parts, *arguments) -> the collective's result
_CACHED_CALLS = 1024


class Communicator:
    """A group of ranks that call the same collectives.

    **Contract.** Every rank calls the same collectives, with the same names, operations, dtypes, shapes and roots, in
    the same order; each call returns when this rank has its result. Before any buffer is written the calls of all
    ranks are compared: where they differ, all of them raise `LayoutMismatchError` with the same text, and the
    communicator stays usable. After any other error raised while ranks wait for each other it is broken, and every
    further call raises `BrokenError`. Wrong arguments raise before other ranks are involved.

    Buffers are C-contiguous NumPy arrays; those that receive results are writable. They must not be changed while the
    call runs. float16, bfloat16, float32, float64 and all integers can be reduced, bool as well can be moved. Sums are
    taken in rank order, and within a rank in the order of its contributions, so they have the same bits however the
    contributions are spread over ranks; 16-bit floats are added in float32, and sums of integers wrap around. "mean"
    divides the sum once by the number of contributions and truncates integers towards zero; there the sum of integers
    does not wrap. Results may take the place of what they are made of, element by element; memory that overlaps
    otherwise is refused.

    Synchronous calls come from one thread at a time. `start_...` begins a named collective that is matched by its
    name: ranks and threads may start different names in different orders. To wait for one name before another one is
    started is something else: where the only threads of two ranks do that in different orders, each waits for what the
    other one would start next. All ranks that wait in such a circle raise `LayoutMismatchError` at once.

    Every wait warns after `stall_warning_s` and raises `CollectiveTimeoutError` after `timeout_s`.

    Made by `collectives.connect`; use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        transport: Transport,
        watch: Watch,
        named: NamedQueue,
        progress: Progress,
        make_subgroup: Callable[[Sequence[int]], Communicator],
        mechanism: str,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.mechanism = mechanism
        self._transport = transport
        self._watch = watch
        self._named = named
        self._progress = progress
        self._make_subgroup = make_subgroup
        self._lock = threading.Lock()
        self._number = 0
        self._state: Exception | None = None
        self._shared: dict[
            int, np.ndarray
        ] = {}  # by the id of what `allocate` returned, the same memory in one dimension
        self._shared_bases: set[int] = set()
        self._calls: dict[tuple[Any, ...], tuple[Call, Reduction]] = {}

    # ---- synchronous collectives

    def all_reduce(self, buffer: np.ndarray, op: str = "sum", *, name: str = "") -> np.ndarray:
        """Reduce `buffer` over all ranks, in place; return it.

        Args:
            buffer: any shape; the result is the same on all ranks.
            op: "sum", "mean", "min" or "max".
            name: the tensor's name, for messages and for the comparison of calls.
        """
        call, reduction = self._describe("all_reduce", name, op, buffer)
        flat = self._private(buffer)
        self._run(call, [flat], 1, finishing.reduce, flat, reduction)
        return buffer

    def ordered_all_reduce(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray | None = None,
        op: str = "sum",
        *,
        name: str = "",
    ) -> np.ndarray:
        """Reduce the contributions of all ranks, in rank order and in their order within each rank.

        Args:
            contributions: this rank's arrays, one per local replica, of equal shape and dtype; they are not changed.
                Ranks may contribute different numbers of arrays.
            out: receives the result; may be one of the contributions, or memory from `allocate`. Default: a new array.
            op: "sum", "mean" (over all contributions), "min" or "max".
            name: the tensor's name.

        Returns:
            `out`.
        """
        if not contributions:
            raise ValueError("ordered_all_reduce was called without contributions; give one array per local replica")
        if out is None:
            out = np.empty_like(contributions[0])
        call, arrays, finish, flat, reduction = self._prepare(contributions, out, op, name)
        self._run(call, arrays, len(arrays), finish, flat, reduction)
        return out

    def grouped_ordered_all_reduce(
        self,
        contributions: Sequence[Sequence[np.ndarray]],
        outs: Sequence[np.ndarray],
        op: str = "sum",
        *,
        names: Sequence[str],
    ) -> Sequence[np.ndarray]:
        """`ordered_all_reduce` of several tensors, in one call where that saves negotiations (over Horovod).

        Args:
            contributions: for each tensor this rank's arrays, equally many for all tensors.
            outs: for each tensor where its result goes.
            op: "sum", "mean", "min" or "max".
            names: of the tensors.

        Returns:
            `outs`.
        """
        tensors = self._check_group(contributions, outs, names)
        prepared = [self._prepare(arrays, out, op, name) for arrays, out, name in tensors]
        if len(prepared) > 1:
            refuse_overlaps_in_group([(call.name, arrays, flat) for call, arrays, _, flat, _ in prepared])
        if not self._transport.groups_reductions or len(tensors) < 2:
            for call, arrays, finish, flat, reduction in prepared:
                self._run(call, arrays, len(arrays), finish, flat, reduction)
            return outs
        group = [(arrays, flat, reduction) for _, arrays, _, flat, reduction in prepared]
        whole = Call("grouped_ordered_all_reduce", ", ".join(names), group=tuple(call for call, *_ in prepared))
        self._run(whole, (), len(contributions[0]), finishing.reduce_group, group)
        return outs

    def broadcast(self, buffer: np.ndarray, root: int = 0, *, name: str = "") -> np.ndarray:
        """Copy `buffer` of rank `root` into `buffer` of every other rank; return it."""
        root = checked_root("root", root, self.size, "ranks")
        call, _ = self._describe("broadcast", name, "", buffer, root)
        flat = flat_view(buffer) if self.rank == root else self._private(buffer)
        self._run(call, [flat], 1, finishing.broadcast, flat, root)
        return buffer

    def all_gather(self, buffer: np.ndarray, out: np.ndarray | None = None, *, name: str = "") -> np.ndarray:
        """Stack the buffers of all ranks: the result has shape (size, *buffer.shape).

        Args:
            buffer: any shape, the same on all ranks.
            out: receives the result; default: a new array.
            name: the tensor's name.
        """
        call, _ = self._describe("all_gather", name, "", buffer)
        out = result_array(out, (self.size, *buffer.shape), buffer.dtype)
        flat = flat_view(buffer)
        self._run(call, [flat], 1, finishing.all_gather, flat, self._gathered(out, flat))
        return out

    def reduce_scatter(
        self, buffer: np.ndarray, out: np.ndarray | None = None, op: str = "sum", *, name: str = ""
    ) -> np.ndarray:
        """Reduce `buffer` over all ranks; each rank receives its one of `size` equal blocks of the first axis.

        Args:
            buffer: shape (size * k, ...); it is not changed.
            out: receives the block, of shape (k, ...); default: a new array.
            op: "sum", "mean", "min" or "max".
            name: the tensor's name.

        Raises:
            ValueError: if the first axis cannot be divided by the number of ranks.
        """
        call, reduction = self._describe("reduce_scatter", name, op, buffer)
        out = result_array(out, self._block_shape(buffer), buffer.dtype)
        flat = flat_view(buffer)
        self._run(call, [flat], 1, finishing.reduce_scatter, self._block(out, [flat]), reduction)
        return out

    def ordered_reduce_scatter(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray | None = None,
        op: str = "sum",
        *,
        name: str = "",
    ) -> np.ndarray:
        """`ordered_all_reduce` of which each rank receives its one of `size` equal blocks of the first axis.

        Args:
            contributions: this rank's arrays, one per local replica, of shape (size * k, ...); they are not changed.
                Ranks may contribute different numbers of arrays.
            out: receives the block, of shape (k, ...); default: a new array.
            op: "sum", "mean" (over all contributions), "min" or "max".
            name: the tensor's name.

        Returns:
            `out`: the bits of that block of what `ordered_all_reduce` returns.

        Raises:
            ValueError: if the first axis cannot be divided by the number of ranks.
        """
        if not contributions:
            raise ValueError("ordered_reduce_scatter was called without contributions; give one array per replica")
        first = contributions[0]
        call, reduction = self._describe("ordered_reduce_scatter", name, op, first)
        arrays = flat_contributions(contributions)
        out = result_array(out, self._block_shape(first), first.dtype)
        self._run(call, arrays, len(arrays), finishing.reduce_scatter, self._block(out, arrays), reduction)
        return out

    def barrier(self, *, name: str = "") -> None:
        """Return when all ranks have called it."""
        call, _ = self._describe("barrier", name, "", None)
        self._run(call, (), 0, finishing.nothing)

    # ---- asynchronous named collectives

    def start_all_reduce(self, buffer: np.ndarray, op: str = "sum", *, name: str) -> Handle:
        """Begin `all_reduce`; `wait` on the handle returns `buffer`."""
        call, reduction = self._describe("all_reduce", name, op, buffer)
        flat = self._private(buffer)
        return self._start(call, [flat], 1, buffer, finishing.reduce, flat, reduction)

    def start_ordered_all_reduce(
        self, contributions: Sequence[np.ndarray], out: np.ndarray, op: str = "sum", *, name: str
    ) -> Handle:
        """Begin `ordered_all_reduce`; `wait` on the handle returns `out`."""
        if not contributions:
            raise ValueError("ordered_all_reduce was started without contributions; give one array per local replica")
        call, arrays, finish, flat, reduction = self._prepare(contributions, out, op, name)
        return self._start(call, arrays, len(arrays), out, finish, flat, reduction)

    def start_broadcast(self, buffer: np.ndarray, root: int = 0, *, name: str) -> Handle:
        """Begin `broadcast`; `wait` on the handle returns `buffer`."""
        root = checked_root("root", root, self.size, "ranks")
        call, _ = self._describe("broadcast", name, "", buffer, root)
        flat = flat_view(buffer) if self.rank == root else self._private(buffer)
        return self._start(call, [flat], 1, buffer, finishing.broadcast, flat, root)

    def start_all_gather(self, buffer: np.ndarray, out: np.ndarray | None = None, *, name: str) -> Handle:
        """Begin `all_gather`; `wait` on the handle returns the stacked array."""
        call, _ = self._describe("all_gather", name, "", buffer)
        out = result_array(out, (self.size, *buffer.shape), buffer.dtype)
        flat = flat_view(buffer)
        return self._start(call, [flat], 1, out, finishing.all_gather, flat, self._gathered(out, flat))

    def start_reduce_scatter(
        self, buffer: np.ndarray, out: np.ndarray | None = None, op: str = "sum", *, name: str
    ) -> Handle:
        """Begin `reduce_scatter`; `wait` on the handle returns this rank's block."""
        call, reduction = self._describe("reduce_scatter", name, op, buffer)
        out = result_array(out, self._block_shape(buffer), buffer.dtype)
        flat = flat_view(buffer)
        return self._start(call, [flat], 1, out, finishing.reduce_scatter, self._block(out, [flat]), reduction)

    def expect_callbacks(self) -> None:
        """Say that named collectives will be started from callbacks of compiled programs.

        Python does not list their threads. So one of them may still end what looks like names that wait for each other,
        and only the limits of time apply.
        """
        self._named.expect_others()

    # ---- memory and groups

    def allocate(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """An array for the results of `ordered_all_reduce`, aligned to 64 bytes; a collective call.

        Where the ranks share memory it is one array for all of them: a large result is then written only once, and
        this rank may read it until it takes part in the next reduction into the same array.
        """
        dtype = np.dtype(dtype)
        call = Call("allocate", dtype=dtype.name, shape=tuple(shape))
        nbytes = math.prod(shape) * dtype.itemsize
        memory: np.ndarray = self._run(call, (), 0, finishing.allocate, nbytes)
        array = memory.view(dtype).reshape(shape)
        if nbytes >= finishing.SHARED_BYTES and self._transport.shares_memory:
            self._shared[id(array)] = array.reshape(-1)
            weakref.finalize(array, self._shared.pop, id(array), None)
            self._shared_bases.add(id(array.base))
            weakref.finalize(array.base, self._shared_bases.discard, id(array.base))
        return array

    @property
    def scatters_reductions(self) -> bool:
        """Whether `ordered_reduce_scatter` moves fewer bytes than `ordered_all_reduce`, with the same bits.

        Over Horovod it does neither; one rank alone has nothing to move.
        """
        return self.size > 1 and self._transport.scatters_reductions

    @property
    def calls_made(self) -> int:
        """How many synchronous collectives this rank has begun."""
        return self._number

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of some of the ranks, numbered in the given order; only they call this, with equal `ranks`.

        Raises:
            ValueError: if `ranks` repeats a rank, names one that does not exist, or leaves this one out.
        """
        members = list(ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise ValueError(f"ranks {members} do not form a group; name different ranks of 0 to {self.size - 1}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not among {members}; only members of a group make it")
        return self._make_subgroup(members)

    # ---- life cycle

    def close(self) -> None:
        """Wait until all ranks close, then give everything back; a second call does nothing.

        Raises:
            LayoutMismatchError: on all ranks if one calls a collective instead.
        """
        if isinstance(self._state, ClosedError):
            return
        if self._state is not None:
            self.abandon()
            return
        self._named.begin_close()
        self._progress = NoProgress()  # the record keeps the last collective of the program
        try:
            self._run(Call(CLOSE), (), 0, finishing.nothing)
            self._named.end_close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give everything back without waiting for other ranks; pending collectives fail."""
        if not isinstance(self._state, ClosedError):
            self._state = ClosedError(f"this communicator of {self.size} ranks has been closed")
            self._named.abandon()
            self._transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    # ---- the one way through

    def _run(self, call: Call, arrays: Sequence[np.ndarray], count: int, finish: Finish, *arguments: Any) -> Any:
        if not self._lock.acquire(False):
            raise BusyError(
                f"{call.title} was called while {self._watch.call.title} runs in another thread; "
                "call from one thread, or use the named start_... calls"
            )
        try:
            if self._state is not None:
                raise self._state
            self._number = number = self._number + 1
            self._watch.call = call
            self._watch.number = number
            self._progress.enter(number, call.label)
            try:
                if call.into_shared:
                    self._transport.stage(arrays, arguments[1])
                    parts = agree(self._transport, call, (), count)
                else:
                    parts = agree(self._transport, call, arrays, count)
                result = finish(self._transport, parts, arrays, *arguments)
            except LayoutMismatchError as error:
                if error.closed and self.rank not in error.closed:
                    self._watch.note(error.closed)  # the record says that they were waited for in vain
                raise
            except BaseException as error:
                self._state = BrokenError(f"{call.title} (collective {number}) failed before: {error}")
                raise
            self._progress.leave()  # not after a failure: the record then says where it was
            return result
        finally:
            self._lock.release()

    def _start(
        self,
        call: Call,
        arrays: Sequence[np.ndarray],
        count: int,
        result: np.ndarray,
        finish: Finish,
        *arguments: Any,
    ) -> Handle:
        if not call.name:
            raise ValueError(f"{call.operation} was started without a name; name it as on the other ranks")
        if self._state is not None:
            raise self._state

        def run(transport: Transport) -> np.ndarray:
            parts = agree(transport, call, () if call.into_shared else arrays, count)
            finish(transport, parts, arrays, *arguments)
            return result

        return self._named.start(call, run)

    def _describe(
        self,
        operation: str,
        name: str,
        op: str,
        buffer: np.ndarray | None,
        root: int = -1,
        into_shared: bool = False,
    ) -> tuple[Call, Reduction]:
        if buffer is None:
            key: tuple[Any, ...] = (operation, name)
        else:
            try:
                key = (operation, name, op, buffer.dtype, buffer.shape, root, into_shared)
            except AttributeError:
                raise UnsupportedBufferError(
                    f"{operation} takes NumPy arrays, not {type(buffer).__name__}; convert it with np.asarray"
                ) from None
        found = self._calls.get(key)
        if found is None:
            if len(self._calls) >= _CACHED_CALLS:
                self._calls.clear()
            found = self._calls[key] = new_call(operation, name, op, buffer, root, into_shared)
        return found

    def _check_group(
        self, contributions: Sequence[Sequence[np.ndarray]], outs: Sequence[np.ndarray], names: Sequence[str]
    ) -> list[tuple[Sequence[np.ndarray], np.ndarray, str]]:
        """The tensors of a grouped call."""
        counts = {len(contributions), len(outs), len(names)}
        if len(counts) > 1:
            raise ValueError(
                f"a group of {len(contributions)} lists of contributions, {len(outs)} outs and {len(names)} names; "
                "give one of each for every tensor"
            )
        shares = sorted({len(arrays) for arrays in contributions})
        if shares[:1] == [0] or len(shares) > 1:
            raise ValueError(
                f"the tensors of a group have {' or '.join(map(str, shares))} contributions; "
                "give one array per local replica for each of them"
            )
        return list(zip(contributions, outs, names, strict=True))

    def _prepare(
        self, contributions: Sequence[np.ndarray], out: np.ndarray, op: str, name: str
    ) -> tuple[Call, list[np.ndarray], Finish, np.ndarray, Reduction]:
        """What an ordered all-reduce needs: the call, the contributions, how it ends, `out` and the arithmetic."""
        first = contributions[0]
        shared = self._shared.get(id(out))
        call, reduction = self._describe("ordered_all_reduce", name, op, first, -1, shared is not None)
        arrays = flat_contributions(contributions)
        if shared is not None and out.shape == first.shape and out.dtype == first.dtype:
            finish, flat = finishing.reduce_into_shared, shared
        else:
            result_array(out, first.shape, first.dtype)
            finish, flat = finishing.reduce, self._private(out)
        refuse_partial_overlap(arrays, flat)
        return call, arrays, finish, flat, reduction

    def _block(self, out: np.ndarray, contributions: Sequence[np.ndarray]) -> np.ndarray:
        """Memory for this rank's block of a reduction, as one dimension."""
        flat = self._private(out)
        refuse_partial_overlap(contributions, flat, self._own(flat.size))
        return flat

    def _gathered(self, out: np.ndarray, flat: np.ndarray) -> np.ndarray:
        """Memory for the buffers of all ranks, of which this one's is `flat`, as one dimension."""
        whole = self._private(out)
        refuse_partial_overlap([whole], flat, self._own(flat.size))
        return whole

    def _own(self, size: int) -> slice:
        """This rank's one of blocks of so many elements."""
        return slice(self.rank * size, (self.rank + 1) * size)

    def _private(self, out: np.ndarray) -> np.ndarray:
        """Memory that this rank alone will write, as one dimension."""
        if self._shared_bases and id(out.base) in self._shared_bases:
            raise UnsupportedBufferError(
                "a part or view of memory from `allocate` cannot receive a result, all ranks would write to it; "
                "give ordered_all_reduce the whole array"
            )
        return flat_view(out, writable=True)

    def _block_shape(self, buffer: np.ndarray) -> tuple[int, ...]:
        if buffer.ndim == 0 or buffer.shape[0] % self.size:
            raise ValueError(
                f"reduce_scatter of shape {list(buffer.shape)} over {self.size} ranks; "
                "the first axis must be a multiple of the number of ranks"
            )
        return (buffer.shape[0] // self.size, *buffer.shape[1:])
