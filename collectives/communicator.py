"""The communicator: the collectives as programs call them, over whatever transport."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike

from collectives import collective_ops
from collectives.calls import CLOSE, Call
from collectives.errors import BrokenError, BusyError, ClosedError, LayoutMismatchError
from collectives.instruments import Instruments, is_seen
from collectives.named import Handle, NamedQueue
from collectives.point_to_point.link import Link
from collectives.requests import Preparations, Request, Result
from collectives.transport import Transport
from collectives.waiting import Limits, Watch


class Communicator:
    """A group of ranks that call the same collectives.

    **Contract.** Every rank calls the same collectives, with the same names, operations, dtypes, shapes and roots, in
    the same order; each call returns when this rank has its result. Before any buffer is written the calls of all
    ranks are compared: where they differ, all of them raise `LayoutMismatchError` with the same text, and the
    communicator stays usable. After any other error raised while ranks wait for each other it is broken, and every
    further call raises `BrokenError`. Wrong arguments raise before other ranks are involved.

    Buffers are C-contiguous NumPy arrays; those that receive results are writable. They must not be changed while the
    call runs. float16, bfloat16, float32, float64 and all integers can be reduced, bool as well can be moved. Sums
    are taken in the order of a tree over all contributions (`collectives.tree`), which are numbered in rank order,
    and within a rank in its own, so they have the same bits however the contributions are spread over ranks; 16-bit
    floats are added in float32, and sums of integers wrap around. "mean" divides the sum once by the number of
    contributions and truncates integers towards zero; there the sum of integers does not wrap. Results may take the
    place of what they are made of, element by element; memory that overlaps otherwise is refused.

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
        instruments: Instruments,
        make_subgroup: Callable[[Sequence[int]], Communicator],
        mechanism: str,
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.mechanism = mechanism
        self._transport = transport
        self._watch = watch
        self._named = named
        self.instruments = instruments
        self._make_subgroup = make_subgroup
        self._lock = threading.Lock()
        self._number = 0
        self._state: Exception | None = None
        self._preparations = Preparations(self.rank, self.size)
        self._let_see(instruments)

    # ---- synchronous collectives

    def all_reduce(self, buffer: np.ndarray, op: str = "sum", *, name: str = "") -> np.ndarray:
        """Reduce `buffer` over all ranks, in place; return it.

        Args:
            buffer: any shape; the result is the same on all ranks.
            op: "sum", "mean", "min" or "max".
            name: the tensor's name, for messages and for the comparison of calls.
        """
        return self._run(self._preparations.all_reduce(buffer, op, name))

    def ordered_all_reduce(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray | None = None,
        op: str = "sum",
        *,
        name: str = "",
    ) -> np.ndarray:
        """Reduce the contributions of all ranks in the order of the tree, numbered in rank order and then in their own.

        Args:
            contributions: this rank's arrays, one per local replica, of equal shape and dtype; they are not changed.
                Ranks may contribute different numbers of arrays.
            out: receives the result; may be one of the contributions, or memory from `allocate`. Default: a new array.
            op: "sum", "mean" (over all contributions), "min" or "max".
            name: the tensor's name.

        Returns:
            `out`.
        """
        return self._run(self._preparations.ordered_all_reduce(contributions, out, op, name))

    def grouped_ordered_all_reduce(
        self,
        contributions: Sequence[Sequence[np.ndarray]],
        outs: Sequence[np.ndarray],
        op: str = "sum",
        *,
        names: Sequence[str],
    ) -> Sequence[np.ndarray]:
        """`ordered_all_reduce` of several tensors, in one call where that is cheaper (over Horovod); return `outs`.

        Args:
            contributions: for each tensor this rank's arrays, equally many for all tensors.
            outs: for each tensor where its result goes.
            op: "sum", "mean", "min" or "max".
            names: of the tensors.
        """
        group = self._preparations.grouped_ordered_all_reduce(contributions, outs, op, names)
        if not self._transport.groups_reductions or len(group) < 2:
            for each in group:
                self._run(each)
            return outs
        call = Call("grouped_ordered_all_reduce", ", ".join(names), group=tuple(each.call for each in group))
        tensors = [each.arguments[0]._replace(is_shared=False) for each in group]
        return self._run(Request(call, (), group[0].count, collective_ops.reduce_group, (tensors,), outs))

    def broadcast(self, buffer: np.ndarray, root: int = 0, *, name: str = "") -> np.ndarray:
        """Copy `buffer` of rank `root` into `buffer` of every other rank; return it."""
        return self._run(self._preparations.broadcast(buffer, root, name))

    def all_gather(self, buffer: np.ndarray, out: np.ndarray | None = None, *, name: str = "") -> np.ndarray:
        """Stack the buffers of all ranks: the result has shape (size, *buffer.shape).

        Args:
            buffer: any shape, the same on all ranks.
            out: receives the result; default: a new array.
            name: the tensor's name.
        """
        return self._run(self._preparations.all_gather(buffer, out, name))

    def gather(self, buffer: np.ndarray, root: int = 0, *, name: str = "") -> np.ndarray | None:
        """Stack the buffers of all ranks on one of them; the others receive nothing.

        Over Horovod they do, and drop it.

        Args:
            buffer: any shape, the same on all ranks.
            root: the rank that receives them.
            name: the tensor's name.

        Returns:
            On the root a new array of shape (size, *buffer.shape), elsewhere None.
        """
        return self._run(self._preparations.gather(buffer, root, name))

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
        return self._run(self._preparations.reduce_scatter(buffer, out, op, name))

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
            contributions: as for `ordered_all_reduce`, of shape (size * k, ...).
            out: receives the block, of shape (k, ...); default: a new array.
            op: as for `ordered_all_reduce`.
            name: the tensor's name.

        Returns:
            `out`: the bits of that block of what `ordered_all_reduce` returns.

        Raises:
            ValueError: if the first axis cannot be divided by the number of ranks.
        """
        return self._run(self._preparations.ordered_reduce_scatter(contributions, out, op, name))

    def barrier(self, *, name: str = "") -> None:
        """Return when all ranks have called it."""
        self._run(self._preparations.barrier(name))

    # ---- asynchronous named collectives

    def start_all_reduce(self, buffer: np.ndarray, op: str = "sum", *, name: str) -> Handle:
        """Begin `all_reduce`; `wait` on the handle returns `buffer`."""
        return self._start(self._preparations.all_reduce(buffer, op, name))

    def start_ordered_all_reduce(
        self, contributions: Sequence[np.ndarray], out: np.ndarray, op: str = "sum", *, name: str
    ) -> Handle:
        """Begin `ordered_all_reduce`; `wait` on the handle returns `out`."""
        return self._start(self._preparations.ordered_all_reduce(contributions, out, op, name, begun="started"))

    def start_broadcast(self, buffer: np.ndarray, root: int = 0, *, name: str) -> Handle:
        """Begin `broadcast`; `wait` on the handle returns `buffer`."""
        return self._start(self._preparations.broadcast(buffer, root, name))

    def start_all_gather(self, buffer: np.ndarray, out: np.ndarray | None = None, *, name: str) -> Handle:
        """Begin `all_gather`; `wait` on the handle returns the stacked array."""
        return self._start(self._preparations.all_gather(buffer, out, name))

    def start_reduce_scatter(
        self, buffer: np.ndarray, out: np.ndarray | None = None, op: str = "sum", *, name: str
    ) -> Handle:
        """Begin `reduce_scatter`; `wait` on the handle returns this rank's block."""
        return self._start(self._preparations.reduce_scatter(buffer, out, op, name))

    def expect_callbacks(self) -> None:
        """Announce that callbacks of compiled programs will start named collectives.

        Python does not list their threads. So one of them may still end what looks like names that wait for each other,
        and only the limits of time apply.
        """
        self._named.expect_others()

    # ---- memory and groups

    def allocate(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Return an array for the results of `ordered_all_reduce`, aligned to 64 bytes; a collective call.

        Where the ranks share memory it is one array for all of them: a large result is then written only once, and
        this rank may read it until it takes part in the next reduction into the same array.
        """
        dtype = np.dtype(dtype)
        call = Call("allocate", dtype=dtype.name, shape=tuple(shape))
        nbytes = math.prod(shape) * dtype.itemsize
        request: Request[np.ndarray] = Request(call, (), 0, collective_ops.allocate, (nbytes,))
        array = self._run(request).view(dtype).reshape(shape)
        if nbytes >= collective_ops.SHARED_BYTES and self._transport.shares_memory:
            self._preparations.share(array)
        return array

    def is_shared(self, nbytes: int) -> bool:
        """Return whether `allocate` returns, for so many bytes, an array that this rank has in common with others."""
        return self.size > 1 and nbytes >= collective_ops.SHARED_BYTES and self._transport.shares_memory

    @property
    def window_bytes(self) -> int:
        """The memory through which the ranks of a host exchange, besides what `allocate` has returned; 0: none."""
        return self._transport.window_bytes

    @property
    def scatters_reductions(self) -> bool:
        """Whether `ordered_reduce_scatter` moves fewer bytes than `ordered_all_reduce`, with the same bits.

        Over Horovod it does neither; one rank alone has nothing to move.
        """
        return self.size > 1 and self._transport.scatters_reductions

    @property
    def link(self) -> Link | None:
        """The link under the messages, for measurements while no collective runs; None without messages."""
        found: Link | None = getattr(self._transport, "link", None)
        return found

    @property
    def limits(self) -> Limits:
        """The limits on the time that ranks wait for each other."""
        return self._watch.limits

    @property
    def calls_made(self) -> int:
        """The number of synchronous collectives that this rank has begun."""
        return self._number

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of some ranks, numbered in the given order; only they call this, with equal `ranks`.

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
        self._let_see(Instruments())  # what was seen last is the last collective of the program
        try:
            self._run(Request(Call(CLOSE), (), 0, collective_ops.nothing))
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

    # ---- the two ways through

    def _run(self, request: Request[Result]) -> Result:
        call = request.call
        if not self._lock.acquire(False):
            raise BusyError(
                f"{call.title} was called while {self._watch.call.title} runs in another thread; "
                "call from one thread, or use the named start_... calls"
            )
        try:
            if self._state is not None:
                raise self._state
            self._number = number = self._number + 1
            watch = self._watch
            watch.call = call
            watch.number = number
            if (begins := self._begins) is not None:
                begins(number, call)
            try:
                result = request.carry_out(self._transport, self._moves)
            except LayoutMismatchError as error:
                if error.closed and self.rank not in error.closed:
                    self._watch.note(error.closed)  # those were waited for in vain
                raise
            except BaseException as error:
                self._state = BrokenError(f"{call.title} (collective {number}) failed before: {error}")
                raise
            if (ends := self._ends) is not None:
                ends()  # not after a failure: what was seen last is where it was
            return result
        finally:
            self._lock.release()

    def _let_see(self, instruments: Instruments) -> None:
        """Keep the methods of instruments, None where nobody looks: a comparison costs less than a call."""
        begins, moves, ends = instruments.operation_begins, instruments.data_moves, instruments.operation_ends
        self._begins = begins if is_seen(begins) else None
        self._moves = moves if is_seen(moves) else None
        self._ends = ends if is_seen(ends) else None

    def _start(self, request: Request[np.ndarray]) -> Handle:
        if not request.call.name:
            raise ValueError(f"{request.call.operation} was started without a name; name it as on the other ranks")
        if self._state is not None:
            raise self._state
        return self._named.start(request)
