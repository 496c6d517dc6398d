"""The communicator: the collectives as programs call them, independent of the transport."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NoReturn

import numpy as np
from numpy.typing import DTypeLike

from collectives import collective_ops, forks
from collectives.calls import CLOSE, Call
from collectives.errors import BrokenError, BusyError, ClosedError, ForkedProcessError, LayoutMismatchError
from collectives.instruments import Instruments, is_seen
from collectives.named import Handle, NamedQueue
from collectives.point_to_point.link import Link, RefusingLink
from collectives.prepared import ORDERED, Key, PreparedReductions
from collectives.requests import Carried, Preparations, Request, Result
from collectives.transport import Prepared, Transport
from collectives.waiting import Limits, Watch

_ENDS = (ClosedError, ForkedProcessError)
"""Why a communicator has nothing to release."""


class Communicator:
    """A group of ranks that call the same collectives.

    `collectives.connect` makes it. Use it as a context manager, or call `close`.

    **Order.** Every rank makes the same calls in the same order, with equal names, operations, dtypes, shapes and
    roots. A call returns when this rank has its result.

    **Mismatch.** The calls of all ranks are compared before any buffer is written. If they differ, every rank raises
    `LayoutMismatchError` with the same text, and the communicator stays usable.

    **Other errors.** Wrong arguments raise an error before other ranks are involved. After any other error the
    communicator is broken: every further call raises `BrokenError`.

    **Buffers** are C-contiguous NumPy arrays; a buffer that receives a result is writable. Do not change a buffer while
    a call uses it. float16, bfloat16, float32, float64 and all integers can be reduced; bool can also be moved. A
    result may replace its input element by element; any other overlap of memory is refused.

    **Sums** follow a tree over all contributions (`collectives.tree`), numbered by rank and by position within the
    rank. So their bits do not depend on how the contributions are spread over ranks (except with the horovod backend).
    16-bit floats are added in float32. Sums of integers wrap around. "mean" divides the sum once by the number of
    contributions, and truncates integers towards zero; the sum behind a mean of integers does not wrap.

    **Threads.** One thread at a time makes synchronous calls. `start_...` begins a named collective, which is matched
    by its name: ranks and threads may start names in different orders. A deadlock is possible if ranks wait for one
    name before they start the next, in different orders. All ranks in the cycle raise `LayoutMismatchError` at once.

    **Forks.** A forked child may read attributes of a communicator of its parent. Other calls raise
    `ForkedProcessError`, and `close` and `abandon` do nothing. The parent does not notice.

    **Time.** Every wait logs a warning after each `stall_warning_s`, and raises `CollectiveTimeoutError` after
    `timeout_s`.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        mechanism: The way of the data: "window", "ring", "window and ring", or the name of the backend.
        instruments: The instruments that observe this rank.
        beside: A link for messages outside of collectives, closed with the communicator; None if the backend has none.
        part: Function that returns a communicator of some ranks as `subgroup` does, but over the same connection: the
            loss of a rank cannot disturb its creation. Called once, and closed before this communicator. None if the
            backend has none.
    """

    beside: Link | None = None
    part: Callable[[Sequence[int]], Communicator] | None = None

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
        self._prepared = PreparedReductions(transport, self._preparations.place_of)
        self._let_see(instruments)
        forks.keep_from_children(self)

    # ---- synchronous collectives

    def all_reduce(self, buffer: np.ndarray, op: str = "sum", *, name: str = "") -> np.ndarray:
        """Reduce `buffer` over all ranks in place, and return it.

        Args:
            buffer: Array of any shape; receives the result, which is the same on all ranks.
            op: "sum", "mean", "min" or "max".
            name: Name of the tensor, for messages and for the comparison of calls.

        Example:
            >>> import collectives
            >>> import numpy as np
            >>> collectives.run_on_threads(2, lambda comm: comm.all_reduce(np.array([1.0 + comm.rank])).tolist())
            [[3.0], [3.0]]
        """
        key = self._prepared.key("all_reduce", name, op, 1, buffer)
        found = self._prepared.calls.get(key)
        if found is not None and found.take((buffer,), buffer):
            self._run_taken(found)
            return buffer
        return self._run_and_learn(key, self._preparations.all_reduce(buffer, op, name))

    def ordered_all_reduce(
        self,
        contributions: Sequence[np.ndarray],
        out: np.ndarray | None = None,
        op: str = "sum",
        *,
        name: str = "",
    ) -> np.ndarray:
        """Reduce the contributions of all ranks in the order of the tree, numbered by rank, then by position.

        Args:
            contributions: Arrays of this rank, one per local replica, of equal shape and dtype; not changed. Ranks may
                contribute different numbers of arrays.
            out: Array for the result: one of the contributions, memory from `allocate`, or another array. Default: a
                new array.
            op: "sum", "mean" (over all contributions), "min" or "max".
            name: Name of the tensor.

        Returns:
            `out`.
        """
        if out is None:
            return self._run(self._preparations.ordered_all_reduce(contributions, out, op, name))
        key = self._prepared.key(ORDERED, name, op, len(contributions), out)
        found = self._prepared.calls.get(key)
        if found is not None and found.take(contributions, out):
            self._run_taken(found)
            return out
        return self._run_and_learn(key, self._preparations.ordered_all_reduce(contributions, out, op, name))

    def grouped_ordered_all_reduce(
        self,
        contributions: Sequence[Sequence[np.ndarray]],
        outs: Sequence[np.ndarray],
        op: str = "sum",
        *,
        names: Sequence[str],
    ) -> Sequence[np.ndarray]:
        """Reduce several tensors as `ordered_all_reduce` does; return `outs`. Over Horovod this is one operation.

        Args:
            contributions: This rank's arrays for each tensor; the same number for all tensors.
            outs: Array for the result of each tensor.
            op: "sum", "mean", "min" or "max".
            names: Name of each tensor.
        """
        if taken := self._prepared.take_group(contributions, outs, op, names):
            self._run_taken(*taken)
            return outs
        group = self._preparations.grouped_ordered_all_reduce(contributions, outs, op, names)
        if not self._transport.groups_reductions or len(group) < 2:
            for each, out in zip(group, outs, strict=True):
                self._run_and_learn(self._prepared.key(ORDERED, each.call.name, op, each.count, out), each)
            return outs
        call = Call("grouped_ordered_all_reduce", ", ".join(names), group=tuple(each.call for each in group))
        tensors = [each.arguments[0]._replace(is_shared=False) for each in group]
        return self._run(Request(call, (), group[0].count, collective_ops.reduce_group, (tensors,), outs))

    def broadcast(self, buffer: np.ndarray, root: int = 0, *, name: str = "") -> np.ndarray:
        """Copy rank `root`'s `buffer` into `buffer` of every other rank, and return it."""
        return self._run(self._preparations.broadcast(buffer, root, name))

    def all_gather(self, buffer: np.ndarray, out: np.ndarray | None = None, *, name: str = "") -> np.ndarray:
        """Stack the buffers of all ranks into an array of shape (size, *buffer.shape).

        Args:
            buffer: Array whose shape is the same on all ranks.
            out: Array for the result; default: a new array.
            name: Name of the tensor.
        """
        return self._run(self._preparations.all_gather(buffer, out, name))

    def shift(
        self, buffer: np.ndarray, out: np.ndarray | None = None, distance: int = 1, *, name: str = ""
    ) -> np.ndarray:
        """Return the buffer of rank `(rank + distance) % size`. Each rank sends once, and receives once.

        Args:
            buffer: Array whose shape is the same on all ranks.
            out: Array for the result, apart from `buffer`; default: a new array.
            distance: Number of ranks, the same on all of them; 0 to size - 1.
            name: Name of the tensor.
        """
        return self._run(self._preparations.shift(buffer, out, distance, name))

    def gather(self, buffer: np.ndarray, root: int = 0, *, name: str = "") -> np.ndarray | None:
        """Stack the buffers of all ranks on rank `root`; the other ranks receive nothing.

        Over Horovod all ranks receive the data, and the others discard it.

        Args:
            buffer: Array whose shape is the same on all ranks.
            root: Receiving rank.
            name: Name of the tensor.

        Returns:
            On the root a new array of shape (size, *buffer.shape), on other ranks None.
        """
        return self._run(self._preparations.gather(buffer, root, name))

    def reduce_scatter(
        self, buffer: np.ndarray, out: np.ndarray | None = None, op: str = "sum", *, name: str = ""
    ) -> np.ndarray:
        """Reduce `buffer` over all ranks; rank r receives block r of `size` equal blocks of the first axis.

        Args:
            buffer: Array of shape (size * k, ...); not changed.
            out: Array of shape (k, ...) for the block; default: a new array.
            op: "sum", "mean", "min" or "max".
            name: Name of the tensor.

        Raises:
            ValueError: The length of the first axis is no multiple of the number of ranks.
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
        """Reduce as `ordered_all_reduce` does; rank r receives block r of `size` equal blocks of the first axis.

        Args:
            contributions: Arrays of this rank, one per local replica, of shape (size * k, ...); not changed.
            out: Array of shape (k, ...) for the block; default: a new array.
            op: "sum", "mean" (over all contributions), "min" or "max".
            name: Name of the tensor.

        Returns:
            `out`, with the bits of the same block of the result of `ordered_all_reduce`.

        Raises:
            ValueError: The length of the first axis is no multiple of the number of ranks.
        """
        return self._run(self._preparations.ordered_reduce_scatter(contributions, out, op, name))

    def barrier(self, *, name: str = "") -> None:
        """Wait until all ranks have called this."""
        self._run(self._preparations.barrier(name))

    # ---- asynchronous named collectives

    def start_all_reduce(self, buffer: np.ndarray, op: str = "sum", *, name: str) -> Handle:
        """Start `all_reduce`; `wait` on the handle returns `buffer`."""
        return self._start(self._preparations.all_reduce(buffer, op, name))

    def start_ordered_all_reduce(
        self, contributions: Sequence[np.ndarray], out: np.ndarray, op: str = "sum", *, name: str
    ) -> Handle:
        """Start `ordered_all_reduce`; `wait` on the handle returns `out`."""
        return self._start(self._preparations.ordered_all_reduce(contributions, out, op, name, begun="started"))

    def start_broadcast(self, buffer: np.ndarray, root: int = 0, *, name: str) -> Handle:
        """Start `broadcast`; `wait` on the handle returns `buffer`."""
        return self._start(self._preparations.broadcast(buffer, root, name))

    def start_all_gather(self, buffer: np.ndarray, out: np.ndarray | None = None, *, name: str) -> Handle:
        """Start `all_gather`; `wait` on the handle returns the stacked array."""
        return self._start(self._preparations.all_gather(buffer, out, name))

    def start_reduce_scatter(
        self, buffer: np.ndarray, out: np.ndarray | None = None, op: str = "sum", *, name: str
    ) -> Handle:
        """Start `reduce_scatter`; `wait` on the handle returns this rank's block."""
        return self._start(self._preparations.reduce_scatter(buffer, out, op, name))

    def expect_callbacks(self) -> None:
        """Announce that callbacks of compiled programs will start named collectives.

        Python does not list the threads of these callbacks, so any of them may still resolve an apparent deadlock. From
        now on deadlocks are not detected, and only the time limits apply.
        """
        self._named.expect_others()

    # ---- memory and groups

    def allocate(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Allocate an array for results of `ordered_all_reduce`, aligned to 64 bytes; a collective call.

        If the ranks share memory, all of them get the same array, and a large result is written only once. This rank
        may read it until it takes part in the next reduction into the same array.
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
        """Return whether `allocate` of `nbytes` bytes returns an array that this rank shares with other ranks."""
        return self.size > 1 and nbytes >= collective_ops.SHARED_BYTES and self._transport.shares_memory

    @property
    def window_bytes(self) -> int:
        """The size of the memory through which the ranks of a host exchange, without memory from `allocate`."""
        return self._transport.window_bytes

    @property
    def scatters_reductions(self) -> bool:
        """Whether `ordered_reduce_scatter` moves fewer bytes than `ordered_all_reduce`, and yields the same bits.

        False over Horovod, which gives neither advantage, and for a single rank, which moves nothing.
        """
        return self.size > 1 and self._transport.scatters_reductions

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of each rank's host, from 0."""
        return self._transport.hosts

    @property
    def link(self) -> Link | None:
        """The link that carries messages, for measurements while no collective runs; None without messages."""
        self.refuse_in_child()
        found: Link | None = getattr(self._transport, "link", None)
        return found

    @property
    def limits(self) -> Limits:
        """The time limits of waits for other ranks."""
        return self._watch.limits

    @property
    def calls_made(self) -> int:
        """The number of synchronous collectives that this rank has begun."""
        return self._number

    def limit_waits(self, timeout_s: float) -> None:
        """Let waits for other ranks end after `timeout_s` seconds, in place of the limit that was set before."""
        self._watch.limits = replace(self._watch.limits, timeout_s=timeout_s)
        self._named.limit_waits(self._watch.limits)

    def watch_beside(self) -> Watch:
        """Return a new watch for waits on `beside`, with the limits of this communicator."""
        watch = copy(self._watch)
        watch.call, watch.number, watch.spins = Call("send and recv"), 0, 0
        watch.pausing = (lambda: None) if self.beside is None else self.beside.pausing
        return watch

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of some ranks, numbered in the given order; only these call it, with equal `ranks`.

        Raises:
            ValueError: `ranks` repeats a rank, has a rank that does not exist, or lacks this rank.
        """
        self.refuse_in_child()
        members = list(ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise ValueError(f"{members} is no group of ranks here; name different ranks of 0 to {self.size - 1}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not among {members}; only members of a group may make it")
        return self._make_subgroup(members)

    # ---- life cycle

    def close(self) -> None:
        """Wait until all ranks close, then release all resources; a second call does nothing.

        Raises:
            LayoutMismatchError: Another rank calls a collective instead. Raised on all ranks; resources are released.
        """
        if isinstance(self._state, _ENDS):
            return
        if self._state is not None:
            self.abandon()
            return
        self._named.begin_close()
        self._let_see(Instruments())  # instruments keep the program's last collective as the last one seen
        is_complete = False
        try:
            self._run(Request(Call(CLOSE), (), 0, collective_ops.nothing))
            self._named.end_close()
            is_complete = True
        finally:
            if self.link is not None:
                self.link.end(is_complete)
            self.abandon()

    def abandon(self) -> None:
        """Release all resources without waiting for other ranks; pending collectives fail."""
        if not isinstance(self._state, _ENDS):
            self._state = ClosedError(f"this communicator of {self.size} ranks has been closed")
            self._named.abandon()
            self._transport.close()
            if self.beside is not None:
                self.beside.close()

    # ---- forks

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that has made the communicator."""
        return isinstance(self._state, ForkedProcessError)

    def refuse_in_child(self) -> None:
        """Raise `ForkedProcessError` in a forked child of the process that has made the communicator."""
        if isinstance(self._state, ForkedProcessError):
            raise self._state

    def disown(self) -> None:
        """Refuse all calls from now on, because this process is a forked child; see `Belonging`."""
        self._state = error = forks.refusal(f"rank {self.rank} of {self.size}")
        self._lock = threading.Lock()
        if self.beside is not None:
            self.beside = RefusingLink(self.beside, error)
        if self.part is not None:
            self.part = self._refused

    def _refused(self, ranks: Sequence[int]) -> NoReturn:
        assert self._state is not None
        raise self._state

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

    def _run(self, request: Carried[Result], learn: Callable[[], None] | None = None) -> Result:
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
                    self._watch.note(error.closed)  # this rank waited for them in vain
                raise
            except BaseException as error:
                self._state = BrokenError(f"{call.title} (collective {number}) failed before: {error}")
                raise
            if (ends := self._ends) is not None:
                ends()  # not after a failure: the record then shows the operation that failed
            if learn is not None:
                learn()  # before another thread may begin an exchange
            return result
        finally:
            self._lock.release()

    def _run_taken(self, *taken: Prepared) -> None:
        try:
            for each in taken:
                self._run(each)
        except BaseException:
            for each in taken:
                each.drop()
            raise

    def _run_and_learn(self, key: Key, request: Request[np.ndarray]) -> np.ndarray:
        return self._run(request, partial(self._prepared.learn, key, request))

    def _let_see(self, instruments: Instruments) -> None:
        """Store methods of instruments, or None if no instrument uses them: `is None` costs less than a call."""
        begins, moves, ends = instruments.operation_begins, instruments.data_moves, instruments.operation_ends
        self._begins = begins if is_seen(begins) else None
        self._moves = moves if is_seen(moves) else None
        self._ends = ends if is_seen(ends) else None

    def _start(self, request: Request[np.ndarray]) -> Handle:
        if not request.call.name:
            raise ValueError(f"{request.call.operation} was started without a name; give it the same name on all ranks")
        if self._state is not None:
            raise self._state
        return self._named.start(request)
