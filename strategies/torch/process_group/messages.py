"""Messages between two ranks of a process group: send and receive, matched by source and tag."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
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

    Attributes:
        ended: The end of the operation; its value is the number of the sending rank, if there is one.
    """

    def __init__(self, title: str, action: Callable[[], int | None], results: list[torch.Tensor]) -> None:
        super().__init__()
        self.title = title
        self._action: Callable[[], int | None] | None = action
        self._results = results
        self.ended: Future[int | None] = Future()
        self._made_in = forks.generation

    def run(self) -> None:
        """Carry the operation out; `wait` raises its error."""
        action, self._action = self._action, None
        assert action is not None
        try:
            source = action()
        except BaseException as error:  # raised by `wait`, in the caller's thread
            self.ended.set_exception(error)
        else:
            self.ended.set_result(source)

    @override
    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for the end and return True; a timeout of 0 means the limits of the group.

        Raises:
            CollectiveError: The errors of the collective.
            CollectiveTimeoutError: The operation has not ended after `timeout`; it goes on.
        """
        forks.refuse_in_child(self._made_in, "the process that has begun the operation")
        try:
            self.ended.result(timeout.total_seconds() if timeout > NO_LIMIT else None)
        except TimeoutError:
            if self.ended.done():
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
        return self.ended.done()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.ended.done() and self.ended.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self.ended.exception() if self.ended.done() else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors of the result, once the operation has ended."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Return the rank in the group from which the tensor was received."""
        if not self.is_success() or (source := self.ended.result()) is None:
            raise ValueError(f"{self.title} has received nothing, so it has no source")
        return source

    _source_rank = source_rank

    @override
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future whose value is the list of result tensors.

        An error in a callback, unlike one that is set, is an error also where C++ code waits for the future.
        """
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.ended.add_done_callback(lambda _: future.set_result(self._results))
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
        self._runner: int | None = None  # the thread that carries a work out
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, work: GroupWork, is_async: bool) -> GroupWork:
        """Carry a work out after all earlier ones; return it, ended unless `is_async`."""
        if self._runner == threading.get_ident():  # in a callback
            work.run()
        else:
            self._begin(work, is_async)
        if not is_async:
            work.wait()
        return work

    def _begin(self, work: GroupWork, is_async: bool) -> None:
        with self._changes:
            runs_here = not (is_async or self._runner or self._pending)
            if runs_here:
                self._runner = threading.get_ident()
            else:
                self._pending.append(work)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
                self._changes.notify_all()
        if runs_here:
            self._run(work)

    def drain(self) -> None:
        """Wait until no work is pending."""
        with self._changes:
            self._changes.wait_for(lambda: not (self._pending or self._runner))

    def close(self) -> None:
        """Let the thread end after the pending works."""
        with self._changes:
            self._is_closed = True
            self._changes.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changes:
                self._changes.wait_for(lambda: (self._pending and not self._runner) or self._is_closed)
                if not self._pending:
                    return
                self._runner = threading.get_ident()
                work = self._pending.popleft()
            self._run(work)
            del work  # its tensors may be freed while this thread waits

    def _run(self, work: GroupWork) -> None:
        try:
            work.run()
        finally:
            with self._changes:
                self._runner = None
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
    """

    data: np.ndarray
    dtype: str
    other: int | None
    tag: int
    work: GroupWork
    is_sent: bool

    def takes(self, source: int, tag: int) -> bool:
        """Return whether a message of `source` with `tag` is meant for this receive."""
        return self.tag == tag and self.other in (None, source)

    def deliver(self, source: int, data: np.ndarray, dtype: str) -> None:
        """End this receive with a message of `source`, which has arrived."""
        if (data.size, dtype) != (self.data.size, self.dtype):
            error = LayoutMismatchError(
                f"rank {source} sent {data.size} bytes of {dtype} with tag {self.tag}, but the tensor of recv has "
                f"{self.data.size} bytes of {self.dtype}; send and receive tensors of equal shape and dtype"
            )
            self.work.ended.set_exception(error)
            return
        if data is not self.data:
            np.copyto(self.data, data)
        self.work.ended.set_result(source)


class _UnaskedMessage(NamedTuple):
    """A message that has arrived before a receive that takes it."""

    source: int
    tag: int
    data: np.ndarray
    dtype: str


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
        self._sending: dict[TensorMessage, Iterator[bool]] = {}
        self._receiving: list[TensorMessage] = []
        self._incoming = [self._messages_of(source) for source in range(link.size)]
        self._arriving: dict[int, TensorMessage | None] = {}  # the receives whose data are on their way, by source
        self._unasked: list[_UnaskedMessage] = []
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
                if message.is_sent:
                    self._sending[message] = self._parts_of(message)
                elif not self._take_unasked(message):
                    self._receiving.append(message)
            self._changes.notify_all()
        if sent := [each for each, parts in self._sending.items() if next(parts, True)]:
            for each in sent:
                each.work.ended.set_result(None)
            with self._changes:
                for each in sent:
                    del self._sending[each]
                self._changes.notify_all()
        moved = [next(self._incoming[source]) for source in self._awaited()]
        return bool(new or sent or any(moved))

    def _parts_of(self, message: TensorMessage) -> Iterator[bool]:
        """Send a header and the pieces of a message; yield False until all are sent."""
        assert message.other is not None
        header = np.array([(message.tag, message.data.size, message.dtype)], _HEADER).view(np.uint8)
        parts = [header, *self._pieces(message.data)]
        yield from _unfinished([self._link.send(part, message.other, EXCHANGE) for part in parts])

    def _messages_of(self, source: int) -> Iterator[bool]:
        """Receive the messages of a rank, one after another; yield whether one has arrived.

        The data arrive in the memory of the receive that takes them, or in new memory.
        """
        while True:
            header = np.empty(_HEADER.itemsize, np.uint8)
            yield from _unfinished([self._link.receive(header, source, EXCHANGE)])
            tag, nbytes, octets = header.view(_HEADER)[0].item()
            dtype, receive = octets.decode(), next((one for one in self._receiving if one.takes(source, tag)), None)
            if receive is not None and (receive.data.size, receive.dtype) == (nbytes, dtype):
                self._receiving.remove(receive)
                data = receive.data
            else:
                receive, data = None, np.empty(nbytes, np.uint8)
            self._arriving[source] = receive
            yield from _unfinished([self._link.receive(piece, source, EXCHANGE) for piece in self._pieces(data)])
            del self._arriving[source]
            if receive is not None:
                receive.deliver(source, data, dtype)
            else:
                self._unasked.append(_UnaskedMessage(source, tag, data, dtype))
                self._receiving = [each for each in self._receiving if not self._take_unasked(each)]
            yield True

    def _pieces(self, data: np.ndarray) -> list[np.ndarray]:
        most = self._link.sizes.longest_message_bytes
        return [data[start : start + most] for start in range(0, data.size, most)]

    def _take_unasked(self, receive: TensorMessage) -> bool:
        for arrived in self._unasked:
            if receive.takes(arrived.source, arrived.tag):
                self._unasked = [one for one in self._unasked if one is not arrived]
                receive.deliver(arrived.source, arrived.data, arrived.dtype)
                return True
        return False

    def _awaited(self) -> set[int]:
        """Return the ranks from which a message is awaited, or has begun to arrive."""
        found = set(self._arriving)
        for each in self._receiving:
            found |= set(range(self._link.size)) - {self._link.rank} if each.other is None else {each.other}
        return found

    def _fail(self, error: BaseException) -> None:
        with self._changes:
            self._error = error
            self._changes.notify_all()
            pending = [*self._new, *self._sending, *self._receiving, *self._arriving.values()]
            self._new = []
        for each in pending:
            if each is not None:
                each.work.ended.set_exception(error)


def _unfinished(transfers: Sequence[Transfer]) -> Iterator[bool]:
    """Yield False until all transfers have ended."""
    for transfer in transfers:
        while not transfer.done():
            yield False
