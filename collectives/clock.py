"""Clocks for limits of time: that of the machine, and one that a test moves."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

_MOMENT_S = 0.001


class Clock(ABC):
    """A clock for limits of time, for any number of threads; times are in seconds."""

    @abstractmethod
    def now_s(self) -> float:
        """Return the time since some point in the past; never less than it was before."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Return after about so long, or earlier: for who looks again and again whether something has happened."""

    @abstractmethod
    def wait(self, event: threading.Event, limit_s: float) -> bool:
        """Return when the event is set, at the latest after `limit_s`; whether it is."""

    @abstractmethod
    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Return when something is true, at the latest after `limit_s`; whether it is.

        Args:
            changed: notified when it may have become true; its lock is held.
            is_true: asked with the lock held.
            limit_s: in seconds of this clock.
        """


@final
class RealClock(Clock):
    """The monotonic clock of the machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        return event.wait(limit_s)

    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool], limit_s: float) -> bool:
        return changed.wait_for(is_true, limit_s)


@final
class FakeClock(Clock):
    """A clock for tests. It begins at 0 and stands still, but for what a test does; who sleeps by it looks again soon.

    Args:
        tick_s: how much passes whenever somebody asks for the time. Who waits in a loop then comes to its limit by
            itself, after so many looks, however fast the machine is.

    Attributes:
        tick_s: see above; may be changed at any time.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self.tick_s = tick_s
        self._lock = threading.Lock()
        self._now_s = 0.0

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        with self._lock:
            self._now_s += seconds

    def now_s(self) -> float:
        with self._lock:
            self._now_s += self.tick_s
            return self._now_s

    def sleep(self, seconds: float) -> None:
        """Sleep for a moment of the machine's clock, and for none of this one."""
        time.sleep(min(seconds, _MOMENT_S))

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        give_up = self.now_s() + limit_s
        while not event.wait(_MOMENT_S):
            if self.now_s() >= give_up:
                return event.is_set()
        return True

    def wait_for(self, changed: threading.Condition, is_true: Callable[[], bool], limit_s: float) -> bool:
        give_up = self.now_s() + limit_s
        while not changed.wait_for(is_true, _MOMENT_S):
            if self.now_s() >= give_up:
                return is_true()
        return True
