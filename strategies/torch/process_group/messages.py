"""Messages between two ranks of a process group: send and receive, matched by source and tag."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field
from datetime import timedelta

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
        self._end: Future[int | None] = Future()  # its value is the number of the sending rank
        self._made_in = forks.generation

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
        self._action = None
        if error is None:
            self._end.set_result(source)
        else:
            self._end.set_exception(error)

    @override
    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for the end and return True; a timeout of 0 means the limits of the group.

        Raises:
            CollectiveError: The errors of the collective.
            CollectiveTimeoutError: The operation has not ended after `timeout`; it goes on.
        """
        forks.refuse_in_child(self._made_in, "the process that has begun the operation")
        try:
            self._end.result(timeout.total_seconds() if timeout > NO_LIMIT else None)
        except TimeoutError:
            if self._end.done():
                raise  # the error of the operation
            raise CollectiveTimeoutError(
                f"{self.title} has not ended after the timeout of {timeout.total_seconds():g} s that wait was given; "
                "see why other ranks are late, or give a longer timeout"
            ) from None
        return True

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self._end.done()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._end.done() and self._end.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self._end.exception() if self._end.done() else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of the result, once the operation has ended."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Return the rank in the group from which the tensor was received."""
        if not self.is_success() or (source := self._end.result()) is None:
            raise ValueError(f"{self.title} has received nothing, so it has no source")
        return source

    _source_rank = source_rank

    @override
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future whose value is the list of result tensors.

        An error in a callback, unlike one that is set, is an error also where C++ code waits for the future.
        """
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._end.add_done_callback(lambda _: future.set_result(self._results))
        return future.then(self._value)

    def _value(self, _: object) -> list[torch.Tensor]:
        if (error := self.exception()) is not None:
            raise error.with_traceback(None)  # torch would write the traceback into its own message
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
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
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


@dataclass(eq=False)
class TensorMessage:
    """A message that a rank sends, or for which it waits.

    Attributes:
        data: The memory of the message, flat uint8. It belongs to the link until the work ends.
        dtype: The dtype of the tensor, which sender and receiver must agree on.
        other: The other rank; None: the rank that sends first.
        tag: The number by which messages are matched.
        work: Ends when the memory may be changed, or when it has the message. If a message of another size or dtype
            arrives, it ends with a `LayoutMismatchError`.
        is_sent: Whether this rank sends it.
        parts: The header and the pieces that are on their way.
        transfers: Their transfers, which keep their order.
    """

    data: np.ndarray
    dtype: str
    other: int | None
    tag: int
    work: GroupWork
    is_sent: bool
    parts: Sequence[np.ndarray] = ()
    transfers: deque[Transfer] = field(default_factory=deque)

    def takes(self, source: int, tag: int) -> bool:
        """Return whether a message of `source` with `tag` is meant for this receive."""
        return self.tag == tag and self.other in (None, source)


@dataclass(eq=False)
class _IncomingMessage:
    """The next message of a rank: its header, one element of `_HEADER` in bytes, then its pieces.

    Attributes:
        source: The rank.
        header: The memory of the header.
        transfers: The transfers of the header; later those of the pieces.
        data: The memory of the pieces; None while the header arrives.
        receive: The receive to which this memory belongs; None: it is new.
    """

    source: int
    header: np.ndarray
    transfers: deque[Transfer]
    data: np.ndarray | None = None
    receive: TensorMessage | None = None

    @property
    def facts(self) -> tuple[int, int, str]:
        """The tag, the number of bytes and the dtype, once the header has arrived."""
        tag, nbytes, dtype = self.header.view(_HEADER)[0].item()
        return tag, nbytes, dtype.decode()

    def deliver(self, receive: TensorMessage) -> None:
        """Give the message, which has arrived, to a receive."""
        tag, nbytes, dtype = self.facts
        if (nbytes, dtype) != (receive.data.size, receive.dtype):
            receive.work.end(
                error=LayoutMismatchError(
                    f"rank {self.source} sent {nbytes} bytes of {dtype} with tag {tag}, but the tensor of recv has "
                    f"{receive.data.size} bytes of {receive.dtype}; send and receive tensors of equal shape and dtype"
                )
            )
            return
        if self.data is not None and self.data is not receive.data:
            np.copyto(receive.data, self.data)
        receive.work.end(self.source)


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
        self._new: list[TensorMessage] = []
        self._sending: list[TensorMessage] = []
        self._receiving: list[TensorMessage] = []
        self._incoming: dict[int, _IncomingMessage] = {}  # by source
        self._unasked: list[_IncomingMessage] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, message: TensorMessage) -> GroupWork:
        """Begin to send or to receive a message, and return its work."""
        with self._changes:
            if self._error is not None:
                raise self._error
            self._new.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="popdist-messages", daemon=True)
                self._thread.start()
            self._changes.notify_all()
        return message.work

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

    # ---- the thread

    def _serve(self) -> None:
        try:
            while True:
                with self._changes:
                    self._changes.wait_for(lambda: self._new or self._missing() or self._error)
                    if self._error is not None:
                        raise self._error
                self._watch.wait(self._advance, self._missing)
        except BaseException as error:  # raised where the program waits for its works
            self._fail(self._error or error)

    def _missing(self) -> list[int]:
        """Return the ranks for which this rank waits."""
        return sorted({each.other for each in self._sending if each.other is not None} | self._awaited())

    def _advance(self) -> bool:
        """Move what can move; return whether something has ended or begun."""
        with self._changes:
            new, self._new = self._new, []
            for message in new:
                self._start(message)
            self._changes.notify_all()
        if sent := [each for each in self._sending if _all_done(each.transfers)]:
            for each in sent:
                each.work.end()
            with self._changes:
                self._sending = [each for each in self._sending if each not in sent]
                self._changes.notify_all()
        moved = [self._hear(source) for source in self._awaited()]
        return bool(new or sent or any(moved))

    def _start(self, message: TensorMessage) -> None:
        if message.other is None or not message.is_sent:
            if not self._take_unasked(message):
                self._receiving.append(message)
            return
        header = np.array([(message.tag, message.data.size, message.dtype)], _HEADER).view(np.uint8)
        message.parts = [header, *self._pieces(message.data)]
        message.transfers = deque(self._link.send(part, message.other, EXCHANGE) for part in message.parts)
        self._sending.append(message)

    def _pieces(self, data: np.ndarray) -> list[np.ndarray]:
        most = self._link.sizes.longest_message_bytes
        return [data[start : start + most] for start in range(0, data.size, most)]

    def _take_unasked(self, receive: TensorMessage) -> bool:
        arrived = next((one for one in self._unasked if receive.takes(one.source, one.facts[0])), None)
        if arrived is None:
            return False
        self._unasked.remove(arrived)
        arrived.deliver(receive)
        return True

    def _awaited(self) -> set[int]:
        """Return the ranks from which a message is awaited, or has begun to arrive."""
        found = {source for source, incoming in self._incoming.items() if incoming.data is not None}
        for each in self._receiving:
            found |= set(range(self._link.size)) - {self._link.rank} if each.other is None else {each.other}
        return found

    def _hear(self, source: int) -> bool:
        """Move the next message of a rank forward; return whether it has arrived."""
        if (incoming := self._incoming.get(source)) is None:
            header = np.empty(_HEADER.itemsize, np.uint8)
            transfer = self._link.receive(header, source, EXCHANGE)
            incoming = self._incoming[source] = _IncomingMessage(source, header, deque([transfer]))
        if _all_done(incoming.transfers) and incoming.data is None:
            self._expect_data(incoming)
        if not _all_done(incoming.transfers):
            return False
        del self._incoming[source]
        if incoming.receive is None:
            self._unasked.append(incoming)
            self._receiving = [each for each in self._receiving if not self._take_unasked(each)]
        else:
            incoming.deliver(incoming.receive)
        return True

    def _expect_data(self, incoming: _IncomingMessage) -> None:
        """Let the data arrive in the memory of the receive that takes them, or in new memory."""
        tag, nbytes, dtype = incoming.facts
        found = next((each for each in self._receiving if each.takes(incoming.source, tag)), None)
        if found is not None and (found.data.size, found.dtype) == (nbytes, dtype):
            self._receiving.remove(found)
            incoming.receive, incoming.data = found, found.data
        else:
            incoming.data = np.empty(nbytes, np.uint8)
        pieces = self._pieces(incoming.data)
        incoming.transfers = deque(self._link.receive(piece, incoming.source, EXCHANGE) for piece in pieces)

    def _fail(self, error: BaseException) -> None:
        with self._changes:
            self._error = error
            self._changes.notify_all()
            pending = [*self._new, *self._sending, *self._receiving]
            self._new = []
        pending += [each.receive for each in self._incoming.values() if each.receive is not None]
        for each in pending:
            each.work.end(error=error)


def _all_done(transfers: deque[Transfer]) -> bool:
    while transfers and transfers[0].done():
        transfers.popleft()
    return not transfers
