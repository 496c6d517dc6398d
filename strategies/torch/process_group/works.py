"""The works of a process group: one collective after another, in a thread of their own if the caller does not wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Work
from typing_extensions import override

from collectives import CollectiveTimeoutError, forks

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
