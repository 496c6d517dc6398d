"""Messages between two ranks of a process group: send and receive, matched by source and tag."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import Work
from typing_extensions import override

from collectives import ClosedError, CollectiveTimeoutError, LayoutMismatchError, forks
from collectives.point_to_point.link import EXCHANGE, Link, Transfer
from collectives.waiting import Watch

NO_LIMIT = timedelta(0)


class GroupWork(Work):
    """One operation of a process group, which may still run.

    Args:
        title: Operation, for messages.
        action: Function that carries the operation out; returns the number of the sending rank, or None.
        results: Tensors that hold the result afterwards; they are the value of the future.
    """

    def __init__(self, title: str, action: Callable[[], int | None], results: list[torch.Tensor]) -> None:
        super().__init__()
        self.title = title
        self._action: Callable[[], int | None] | None = action
        self._results = results
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._made_in = forks.generation
        self._error: BaseException | None = None
        self._source: int | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def run(self) -> None:
        """Carry the operation out; `wait` raises its error."""
        try:
            assert self._action is not None
            source = self._action()
        except BaseException as error:  # raised by `wait`, in the caller's thread
            self.end(error=error)
        else:
            self.end(source)

    def end(self, source: int | None = None, error: BaseException | None = None) -> None:
        """Note the end of the operation."""
        with self._lock:
            self._source, self._error, self._action = source, error, None
            self._ended.set()
            future = self._future
        if future is not None:
            future.set_result(self._results)

    @override
    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for the end and return True; a timeout of 0 means the limits of the group.

        Raises:
            CollectiveError: The errors of the collective.
            CollectiveTimeoutError: The operation has not ended after `timeout`; it goes on.
        """
        forks.refuse_in_child(self._made_in, "the process that has begun the operation")
        if not self._ended.wait(timeout.total_seconds() if timeout > NO_LIMIT else None):
            raise CollectiveTimeoutError(
                f"{self.title} has not ended after the timeout of {timeout.total_seconds():g} s that wait was given; "
                "see why other ranks are late, or give a longer timeout"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of the result, once the operation has ended."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Return the rank in the group from which the tensor was received."""
        if self._source is None:
            raise ValueError(f"{self.title} has received nothing, so it has no source")
        return self._source

    _source_rank = source_rank

    @override
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future whose value is the list of result tensors.

        An error in a callback, unlike one that is set, is an error also where C++ code waits for the future.
        """
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
            future, has_ended = self._future, self._ended.is_set()
        if has_ended and not future.done():
            future.set_result(self._results)
        return future.then(self._value)

    def _value(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error.with_traceback(None)  # torch would write the traceback into its own message
        return self._results


class WorkQueue:
    """The works of one process group, carried out in the order in which they were begun.

    A caller that waits at once carries its work out itself if no other one is pending: this spares two switches between
    threads. The thread starts with the first work whose caller does not wait. Works that a callback of an ended work
    begins are carried out at once, before the works that were begun after that work: so all ranks have one order.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changes = threading.Condition()
        self._pending: deque[GroupWork] = deque()
        self._is_busy = False
        self._runner: int | None = None  # the thread that carries a work out
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, work: GroupWork, is_async: bool) -> GroupWork:
        """Carry a work out after all earlier ones; return it, ended unless `is_async`."""
        if self._runner == threading.get_ident():  # in a callback
            work.run()
            if not is_async:
                work.wait()
            return work
        with self._changes:
            runs_here = not (is_async or self._is_busy or self._pending)
            if runs_here:
                self._is_busy = True
            else:
                self._pending.append(work)
                self._ensure_thread()
                self._changes.notify_all()
        if runs_here:
            self._run(work)
        if not is_async:
            work.wait()
        return work

    def drain(self) -> None:
        """Wait until no work is pending."""
        with self._changes:
            self._changes.wait_for(lambda: not (self._pending or self._is_busy))

    def close(self) -> None:
        """Let the thread end after the pending works."""
        with self._changes:
            self._is_closed = True
            self._changes.notify_all()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._changes:
                self._changes.wait_for(lambda: (self._pending and not self._is_busy) or self._is_closed)
                if not self._pending:
                    return
                self._is_busy = True
                work = self._pending.popleft()
            self._run(work)
            del work  # its tensors may be freed while this thread waits

    def _run(self, work: GroupWork) -> None:
        self._runner = threading.get_ident()
        try:
            work.run()
        finally:
            with self._changes:
                self._is_busy, self._runner = False, None
                self._changes.notify_all()


_HEADER = np.dtype([("tag", np.int64), ("nbytes", np.int64), ("dtype", "S24")])


class Header(NamedTuple):
    """Facts about a message, which are sent before it."""

    tag: int
    nbytes: int
    dtype: str


@dataclass(eq=False)
class Sending:
    """A message on its way: its transfers, which keep their order."""

    to: int
    transfers: deque[Transfer]
    work: GroupWork
    parts: list[np.ndarray]  # belong to the link until the transfers are done


@dataclass(eq=False)
class Receiving:
    """A receive that waits for its message; `source` None: from any rank."""

    into: np.ndarray
    dtype: str
    source: int | None
    tag: int
    work: GroupWork

    def takes(self, source: int, tag: int) -> bool:
        """Return whether a message of `source` with `tag` is meant for this receive."""
        return self.tag == tag and self.source in (None, source)


@dataclass(eq=False)
class ArrivingMessage:
    """The next message of one rank: its header, one element of `_HEADER` in bytes, then its pieces."""

    header: np.ndarray
    transfers: deque[Transfer]
    is_header: bool = True
    data: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    receive: Receiving | None = None

    @property
    def told(self) -> Header:
        """The header, once it has arrived."""
        tag, nbytes, dtype = self.header.view(_HEADER)[0].item()
        return Header(tag, nbytes, dtype.decode())


class Messages:
    """The messages of one rank of a process group, moved by a thread while some are pending.

    Messages between two ranks with equal tags keep their order. A message that nobody has asked for yet is kept.

    Args:
        link: Link that carries the messages; nobody else uses it.
        watch: Waits for other ranks on the link.
    """

    def __init__(self, link: Link, watch: Watch) -> None:
        self._link = link
        self._watch = watch
        self._changes = threading.Condition()
        self._new: list[Receiving | tuple[np.ndarray, str, int, int, GroupWork]] = []
        self._sending: list[Sending] = []
        self._receiving: list[Receiving] = []
        self._arriving: dict[int, ArrivingMessage] = {}
        self._unasked: list[tuple[int, Header, np.ndarray]] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def send(self, data: np.ndarray, dtype: str, to: int, tag: int, work: GroupWork) -> None:
        """Begin to send `data` (flat, uint8) to a rank; `work` ends when the memory may be changed."""
        self._begin((data, dtype, to, tag, work))

    def receive(self, into: np.ndarray, dtype: str, source: int | None, tag: int, work: GroupWork) -> None:
        """Begin to receive a message into `into` (flat, uint8), from a rank or from any.

        If the message has another size or dtype, `work` ends with a `LayoutMismatchError`.
        """
        self._begin(Receiving(into, dtype, source, tag, work))

    def finish(self) -> None:
        """Wait until all messages have been sent, then fail pending receives; the caller closes the link."""
        with self._changes:
            self._changes.wait_for(lambda: self._error is not None or not (self._new or self._sending))
        self.close()

    def close(self) -> None:
        """Fail all pending messages, and wait for the thread; the caller closes the link."""
        with self._changes:
            if self._error is None:
                self._error = ClosedError("the process group was destroyed")
            self._watch.cancelled = True
            self._changes.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, request: Receiving | tuple[np.ndarray, str, int, int, GroupWork]) -> None:
        with self._changes:
            if self._error is not None:
                raise self._error
            self._new.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="popdist-messages", daemon=True)
                self._thread.start()
            self._changes.notify_all()

    # ---- the thread

    def _serve(self) -> None:
        try:
            while True:
                with self._changes:
                    self._changes.wait_for(lambda: self._new or self._is_pending() or self._error)
                    if self._error is not None:
                        raise self._error
                self._watch.wait(self._advance, self._missing)
        except BaseException as error:  # raised where the program waits for its works
            self._fail(self._error or error)

    def _is_pending(self) -> bool:
        return bool(self._sending or self._awaited())

    def _missing(self) -> list[int]:
        """Return the ranks for which this rank waits."""
        return sorted({each.to for each in self._sending} | self._awaited())

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._link.size) if rank != self._link.rank)

    def _advance(self) -> bool:
        """Move what can move; return whether something has ended or begun."""
        with self._changes:
            new, self._new = self._new, []
            for request in new:
                self._start(request)
            self._changes.notify_all()
        if sent := [each for each in self._sending if _all_done(each.transfers)]:
            for each in sent:
                each.work.end()
            with self._changes:
                self._sending = [each for each in self._sending if each not in sent]
                self._changes.notify_all()
        moved = [self._hear(source) for source in self._awaited()]
        return bool(new or sent or any(moved))

    def _start(self, request: Receiving | tuple[np.ndarray, str, int, int, GroupWork]) -> None:
        if isinstance(request, Receiving):
            if not self._take_unasked(request):
                self._receiving.append(request)
            return
        data, dtype, to, tag, work = request
        header = np.array([(tag, data.size, dtype)], _HEADER).view(np.uint8)
        parts = [header, *self._pieces(data)]
        transfers = deque(self._link.send(part, to, EXCHANGE) for part in parts)
        self._sending.append(Sending(to, transfers, work, parts))

    def _pieces(self, data: np.ndarray) -> list[np.ndarray]:
        most = self._link.sizes.longest_message_bytes
        return [data[start : start + most] for start in range(0, data.size, most)]

    def _take_unasked(self, request: Receiving) -> bool:
        for place, (source, header, data) in enumerate(self._unasked):
            if request.takes(source, header.tag):
                del self._unasked[place]
                _deliver(request, source, header, data)
                return True
        return False

    def _awaited(self) -> set[int]:
        """Return the ranks from which a message is awaited, or has begun to arrive."""
        found = {source for source, arriving in self._arriving.items() if not arriving.is_header}
        for each in self._receiving:
            found |= {each.source} if each.source is not None else set(self._others())
        return found

    def _hear(self, source: int) -> bool:
        """Move the next message of a rank forward; return whether it has arrived."""
        arriving = self._arriving.get(source)
        if arriving is None:
            header = np.empty(_HEADER.itemsize, np.uint8)
            transfer = self._link.receive(header, source, EXCHANGE)
            arriving = self._arriving[source] = ArrivingMessage(header, deque([transfer]))
        if not _all_done(arriving.transfers):
            return False
        if arriving.is_header:
            self._expect_data(source, arriving)
            if not _all_done(arriving.transfers):
                return False
        del self._arriving[source]
        if arriving.receive is None:
            self._unasked.append((source, arriving.told, arriving.data))
            self._receiving = [each for each in self._receiving if not self._take_unasked(each)]
        else:
            _deliver(arriving.receive, source, arriving.told, arriving.data)
        return True

    def _expect_data(self, source: int, arriving: ArrivingMessage) -> None:
        """Let the data arrive in the memory of the receive that takes them, or in new memory."""
        arriving.is_header = False
        told = arriving.told
        found = next((each for each in self._receiving if each.takes(source, told.tag)), None)
        if found is not None and (found.into.size, found.dtype) == (told.nbytes, told.dtype):
            self._receiving.remove(found)
            arriving.receive, arriving.data = found, found.into
        else:
            arriving.data = np.empty(told.nbytes, np.uint8)
        pieces = self._pieces(arriving.data)
        arriving.transfers = deque(self._link.receive(piece, source, EXCHANGE) for piece in pieces)

    def _fail(self, error: BaseException) -> None:
        with self._changes:
            self._error = error
            self._changes.notify_all()
            new, self._new = self._new, []
        works = [each.work if isinstance(each, Receiving) else each[-1] for each in new]
        works += [each.work for each in self._sending] + [each.work for each in self._receiving]
        works += [each.receive.work for each in self._arriving.values() if each.receive is not None]
        for work in works:
            work.end(error=error)


def _all_done(transfers: deque[Transfer]) -> bool:
    while transfers and transfers[0].done():
        transfers.popleft()
    return not transfers


def _deliver(receive: Receiving, source: int, header: Header, data: np.ndarray) -> None:
    if (data.size, header.dtype) != (receive.into.size, receive.dtype):
        receive.work.end(
            error=LayoutMismatchError(
                f"rank {source} sent {data.size} bytes of {header.dtype} with tag {header.tag}, but the tensor of recv "
                f"has {receive.into.size} bytes of {receive.dtype}; send and receive tensors of equal shape and dtype"
            )
        )
        return
    if data is not receive.into:
        np.copyto(receive.into, data)
    receive.work.end(source)
