"""Access to the warnings of a stall watch as they come."""

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
