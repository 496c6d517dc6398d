"""Ranks on threads that a test can lose at a chosen point."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from collectives import Limits, ThreadHub

Result = TypeVar("Result")

LIMITS = Limits(stall_warning_s=50, timeout_s=60)
"""A guard against hanging; no test waits for it."""


class Lost(BaseException):
    """The end of the thread of a lost rank; the rank cannot handle it."""


class OnMessage:
    """The loss of a rank at its message with this number, counted from 0 between `begin` and `end`.

    Serves as a `before_send` of hubs. Messages are those over links; shared memory has none.
    """

    def __init__(self, rank: int, number: int) -> None:
        self._rank = rank
        self._left = number
        self._is_counting = False
        self.has_struck = False

    def begin(self) -> None:
        """Start to count; the rank itself calls this."""
        self._is_counting = True

    def end(self) -> None:
        """Stop to count."""
        self._is_counting = False

    def __call__(self, source: int, to: int) -> None:
        if source != self._rank or not self._is_counting or threading.current_thread().name != thread_name(source):
            return
        self._left -= 1
        if self._left < 0:
            self.has_struck = True
            raise Lost


def meeting_point(count: int) -> threading.Barrier:
    """Return a barrier for `count` ranks beside their hub; a rank behind it may be lost, or move a clock.

    A collective, even a barrier, releases some ranks while others are still inside. If a released rank is lost, and
    another one notices that and revokes the hub, ranks inside wait in vain although no rank that they wait for is lost.
    """
    return threading.Barrier(count, timeout=LIMITS.timeout_s)


def thread_name(rank: int) -> str:
    return f"member-{rank}"


def run_members(hub: ThreadHub, member: Callable[[int], Result]) -> list[Result | None]:
    """Run `member(rank)` for every rank, each in its own thread; return None for lost ranks.

    A rank whose function raises `Lost` is lost, and the others are told. Any other exception has the same effect
    on the others, and is raised here, too.
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
