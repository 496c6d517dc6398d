"""Seeing the warnings of a stall watch as they come, and a clock that tests move."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 60.0


class Warnings(logging.Handler):
    """The warnings of the collectives, with a way to wait for the next one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.texts.append(record.getMessage())
            self._changed.notify_all()

    def containing(self, *words: str) -> list[str]:
        return [text for text in self.texts if all(word in text for word in words)]

    def wait_for(self, count: int, *words: str) -> list[str]:
        """Return as soon as `count` warnings contain all the words."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.containing(*words)) >= count, LIMIT_S)
        assert came, f"no {count} warnings with {words} came, but {self.texts}"
        return self.containing(*words)


@contextmanager
def watched() -> Iterator[Warnings]:
    warnings = Warnings()
    logger = logging.getLogger("collectives")
    logger.addHandler(warnings)
    try:
        yield warnings
    finally:
        logger.removeHandler(warnings)


class FakeClock:
    """A clock that tests move; every look at it takes a moment, so that who waits by it comes to its sleep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._step_s = 1e-5

    def __call__(self) -> float:
        with self._lock:
            self._now_s += self._step_s
            return self._now_s

    def advance(self, seconds: float) -> None:
        """So much time passes."""
        with self._lock:
            self._now_s += seconds

    def hurry(self) -> None:
        """From now on ten seconds pass at every look, so that whoever waits soon gives up."""
        with self._lock:
            self._step_s = 10.0
