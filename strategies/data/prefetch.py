"""Runs an iterator ahead of its consumer, in a background thread that never outlives it."""

import atexit
import logging
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")

SLOW_WARNING_S = 30.0
JOIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)

_is_reading_ahead: ContextVar[bool] = ContextVar("is_reading_ahead", default=False)


@contextmanager
def reading_ahead() -> Iterator[None]:
    """While items are computed before they are asked for, so at other times on other instances."""
    token = _is_reading_ahead.set(True)
    try:
        yield
    finally:
        _is_reading_ahead.reset(token)


def is_reading_ahead() -> bool:
    """Whether this thread computes items before they are asked for."""
    return _is_reading_ahead.get()


def prefetched(items: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Yields what `items` yields, computing up to `depth` of them before they are asked for.

    `items` runs in a daemon thread that starts with the first item asked for. An exception in `items` is
    raised here, after the items that came before it. The thread ends, and `items` is closed, when `items` is
    exhausted, when this generator is closed or garbage-collected (leaving a `for` loop does that) and before
    the interpreter exits. With `depth` 0 there is no thread.
    """
    if depth == 0:
        yield from items
        return
    yield from _given(_Worker(items, depth))


class Prefetcher(Generic[T]):
    """`prefetched`, of which one can ask whether the next item is there."""

    def __init__(self, items: Generator[T, None, None], depth: int) -> None:
        self._worker = _Worker(items, depth)
        self._items: Generator[T, None, None] = _given(self._worker)

    @property
    def has_next(self) -> bool:
        """Whether the next item can be taken without waiting for it."""
        return self._worker.has_item

    def __next__(self) -> T:
        return next(self._items)

    def close(self) -> None:
        """End the thread."""
        self._items.close()


def _given(worker: "_Worker[T]") -> Generator[T, None, None]:
    try:
        yield from worker.start()
    finally:
        worker.stop()


class _Worker(Generic[T]):
    """The thread, and the bounded queue between it and the consumer."""

    def __init__(self, items: Generator[T, None, None], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_finished = False
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._produce, name="dataset-prefetch", daemon=True)

    @property
    def has_item(self) -> bool:
        with self._changed:
            return bool(self._ready)

    def start(self) -> Generator[T, None, None]:
        # Last registered, first called: the thread ends before JAX, imported earlier, clears its backends.
        atexit.register(self.stop)
        self._thread.start()
        while self._wait_for_item():
            yield self._take()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        with self._changed:
            if self._is_stopped:  # at exit: the generator is collected when modules are empty already
                return
            self._is_stopped = True
            self._ready.clear()
            self._changed.notify_all()
        atexit.unregister(self.stop)
        # The garbage collector may close an abandoned generator from any thread, this one included.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _produce(self) -> None:
        try:
            with reading_ahead(), closing(self._items):
                while self._wait_for_room():
                    self._put(next(self._items))
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_finished = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._ready) < self._depth)
            return not self._is_stopped

    def _put(self, item: T) -> None:
        with self._changed:
            if not self._is_stopped:
                self._ready.append(item)
                self._changed.notify_all()

    def _wait_for_item(self) -> bool:
        with self._changed:
            while not self._changed.wait_for(lambda: self._ready or self._is_finished, SLOW_WARNING_S):
                log.warning("no batch for %.0f s: the data source is slow or stuck", SLOW_WARNING_S)
            return bool(self._ready)

    def _take(self) -> T:
        with self._changed:
            self._changed.notify_all()
            return self._ready.popleft()
