"""What a background thread prepares for whoever may need it later."""

from __future__ import annotations

import atexit
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")

logger = logging.getLogger(__name__)

WAIT_S = 600.0
"""How long somebody waits for what is being prepared; then it is made where it is needed."""


class Background(Generic[T]):
    """Prepares one thing after another in a thread, which ends when nothing is left to do.

    Nothing that goes wrong there reaches anybody else: it is logged, and the thing is not there. A process that ends
    waits for what is being prepared, and drops the rest: where a thread is in XLA's compiler while Python ends, the
    process aborts or has a segmentation fault (seen with Python 3.11 and JAX 0.10).

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, Callable[[], T]] = {}
        self._running: Hashable = None
        self._found: dict[Hashable, T] = {}
        self._is_working = False

    def prepare(self, key: Hashable, make: Callable[[], T]) -> None:
        """Have something made, unless there is something under this key already."""
        with self._changed:
            if key in self._waiting or key in self._found or key == self._running:
                return
            self._waiting[key] = make
            if not self._is_working:
                self._is_working = _start(self._name, self._work)

    def put(self, key: Hashable, thing: T) -> None:
        """Add something that is there already."""
        with self._changed:
            self._found[key] = thing

    def take(self, key: Hashable) -> T | None:
        """What was prepared; waits while it is being prepared. None where that has not begun, or has failed."""
        with self._changed:
            self._waiting.pop(key, None)  # whoever needs it now is as fast
            if not self._changed.wait_for(lambda: self._running != key, WAIT_S):
                logger.warning("waited %g s for what the thread %s prepares; going on without it", WAIT_S, self._name)
                self._running = None
            return self._found.pop(key, None)

    def keep(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Drop everything under other keys."""
        with self._changed:
            self._waiting = {key: make for key, make in self._waiting.items() if is_wanted(key)}
            self._found = {key: thing for key, thing in self._found.items() if is_wanted(key)}
            if not is_wanted(self._running):
                self._running = None

    def _work(self) -> None:
        while (next_one := self._next()) is not None:
            key, make = next_one
            self._finish(key, _made(make))

    def _next(self) -> tuple[Hashable, Callable[[], T]] | None:
        with self._changed:
            if not self._waiting or _is_ending.is_set():
                self._is_working = False
                return None
            self._running = next(iter(self._waiting))
            return self._running, self._waiting.pop(self._running)

    def _finish(self, key: Hashable, thing: T | None) -> None:
        with self._changed:
            if self._running == key:  # otherwise nobody wants it any more
                self._running = None
                if thing is not None:
                    self._found[key] = thing
            self._changed.notify_all()


def _made(make: Callable[[], T]) -> T | None:
    try:
        return make()
    except BaseException:  # also an exit: it is not this thread's to end the program
        logger.warning("what was prepared in the background failed; it is made when it is needed", exc_info=True)
        return None


# ---- the end of the process

_is_ending = threading.Event()
_threads: WeakSet[threading.Thread] = WeakSet()
_lock = threading.Lock()
_is_watched = False


def _start(name: str, work: Callable[[], None]) -> bool:
    """Begin to work in a thread, in the present context, such as the scope of a strategy; whether that was possible."""
    global _is_watched
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=True)
    with _lock:
        if not _is_watched:
            atexit.register(_wait_for_all)
            _is_watched = True
        _threads.add(thread)
    try:
        thread.start()
    except RuntimeError as error:  # there are as many as the system allows
        logger.warning("nothing is prepared in the background: %s", error)
        return False
    return True


def _wait_for_all() -> None:
    _is_ending.set()
    give_up = time.monotonic() + WAIT_S
    for thread in [thread for thread in _threads if thread.is_alive()]:
        thread.join(max(0.0, give_up - time.monotonic()))
