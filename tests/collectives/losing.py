"""Ranks on threads that may be lost, at a point that a test names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from collectives import Limits, ThreadHub

Result = TypeVar("Result")

LIMITS = Limits(stall_warning_s=50, timeout_s=60)
"""A guard against hanging: no test waits for it."""


class Lost(BaseException):
    """Ends the thread of a rank that is lost; what the rank itself would handle it does not."""


class OnMessage:
    """Loses a rank instead of its message with this number, counted from 0 between `begin` and `end`.

    A `before_send` of hubs. Messages are those over links; shared memory has none.
    """

    def __init__(self, rank: int, number: int) -> None:
        self._rank = rank
        self._left = number
        self._is_counting = False
        self.has_struck = False

    def begin(self) -> None:
        """Count from here on; called by the rank itself."""
        self._is_counting = True

    def end(self) -> None:
        """Count no further."""
        self._is_counting = False

    def __call__(self, source: int, to: int) -> None:
        if source != self._rank or not self._is_counting or threading.current_thread().name != thread_name(source):
            return
        self._left -= 1
        if self._left < 0:
            self.has_struck = True
            raise Lost


def meeting_point(count: int) -> threading.Barrier:
    """Where so many ranks wait for each other beside their hub: whoever has come through may be lost, or move a clock.

    A collective lets some go while others are still inside of it, a barrier too. If one that is through is lost, and
    another one notices it and revokes the hub, those inside wait in vain though nobody whom they wait for is lost.
    """
    return threading.Barrier(count, timeout=LIMITS.timeout_s)


def thread_name(rank: int) -> str:
    return f"member-{rank}"


def run_members(hub: ThreadHub, member: Callable[[int], Result]) -> list[Result | None]:
    """`member(rank)` for every rank, each in a thread of its own; None for those that were lost.

    A rank whose function raises `Lost` is lost, and the others learn of it; so it is, for them, if it raises anything
    else, but that is raised here too.
    """

    def run(rank: int) -> Result | None:
        threading.current_thread().name = thread_name(rank)
        try:
            return member(rank)
        except Lost:
            hub.lose(rank)
            return None
        except BaseException as error:
            hub.lose(rank, f"rank {rank} has failed: {type(error).__name__}: {error}")
            raise

    with ThreadPoolExecutor(hub.size) as pool:
        futures = [pool.submit(run, rank) for rank in range(hub.size)]
    errors = [future.exception() for future in futures if future.exception() is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
