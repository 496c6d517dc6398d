"""Clocks for time limits: the machine's clock, and a clock that tests control."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from typing_extensions import override

_MOMENT_S = 0.001


class Clock(ABC):
    """A clock for time limits, usable by several threads. All times are in seconds."""

    @abstractmethod
    def now_s(self) -> float:
        """Return the time since a fixed point in the past; it never decreases."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Sleep for about `seconds` or less. The caller polls a condition between sleeps."""

    @abstractmethod
    def wait(self, event: threading.Event, limit_s: float) -> bool:
        """Wait until the event is set or `limit_s` has passed; return whether it is set."""

    @abstractmethod
    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `is_true()` holds or `limit_s` has passed; return whether it holds.

        Args:
            changed: Condition that is notified when the answer of `is_true` may have changed. The caller holds its
                lock.
            is_true: Predicate, called with the lock held.
            limit_s: Time limit in seconds of this clock.
        """


@final
class RealClock(Clock):
    """The monotonic clock of the machine."""

    @override
    def now_s(self) -> float:
        return time.monotonic()

    @override
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @override
    def wait(self, event: threading.Event, limit_s: float) -> bool:
        return event.wait(limit_s)

    @override
    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool], limit_s: float) -> bool:
        return changed.wait_for(is_true, limit_s)


@final
class FakeClock(Clock):
    """A clock for tests. It starts at 0 and moves only when a test calls `advance`, or by `tick_s`.

    A thread that sleeps by this clock returns after a real moment and looks at its condition again.

    Args:
        tick_s: Seconds added to the clock by each call of `now_s`. A polling wait then reaches its limit after a
            fixed number of polls, independent of the speed of the machine.

    Attributes:
        tick_s: Seconds per call of `now_s`; may be changed at any time.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self.tick_s = tick_s
        self._lock = threading.Lock()
        self._now_s = 0.0

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`."""
        with self._lock:
            self._now_s += seconds

    @override
    def now_s(self) -> float:
        with self._lock:
            self._now_s += self.tick_s
            return self._now_s

    def sleep(self, seconds: float) -> None:
        """Sleep for a real millisecond at most; this clock does not move."""
        time.sleep(min(seconds, _MOMENT_S))

    @override
    def wait(self, event: threading.Event, limit_s: float) -> bool:
        give_up = self.now_s() + limit_s
        while not event.wait(_MOMENT_S):
            if self.now_s() >= give_up:
                return event.is_set()
        return True

    @override
    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool], limit_s: float) -> bool:
        give_up = self.now_s() + limit_s
        while not changed.wait_for(is_true, _MOMENT_S):
            if self.now_s() >= give_up:
                return is_true()
        return True
