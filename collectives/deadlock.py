"""Deadlock detection for named collectives: the waits of each rank's threads, and the ranks that cannot continue."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

Key = tuple[str, int]  # a tensor's name, and the number of its earlier uses


class Awaited(Protocol):
    """A named collective for which a thread waits."""

    key: Key

    def done(self) -> bool:
        """Return whether the collective has ended."""


class WaitingThreads:
    """The threads of one rank that may start named collectives, and their awaited collectives.

    These are all threads that have started a named collective, and all other non-daemon threads. Other daemon threads
    are assumed to serve a library. Threads that Python does not list must be announced
    (`expect_others`). One thread at a time calls the methods, except for `until`.
    """

    def __init__(self) -> None:
        self._starters: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._awaited: dict[threading.Thread, Awaited] = {}
        self._expects_others = False

    def expect_others(self) -> None:
        """Note that an unlisted thread may start collectives at any time."""
        self._expects_others = True

    def add_starter(self) -> None:
        """Note that the calling thread starts collectives."""
        self._starters.add(threading.current_thread())

    @contextmanager
    def until(self, awaited: Awaited) -> Iterator[None]:
        """Note that the calling thread waits for `awaited` during the `with` block."""
        thread = threading.current_thread()
        self._awaited[thread] = awaited
        try:
            yield
        finally:
            self._awaited.pop(thread, None)

    def if_all_wait(self) -> list[Key] | None:
        """Return the collectives for which all threads wait, or None if a thread can continue by itself."""
        if self._expects_others:
            return None
        awaited = dict(self._awaited)
        keys = set()
        for thread in threading.enumerate():
            if thread.daemon and thread not in self._starters:
                continue
            if thread not in awaited or awaited[thread].done():
                return None
            keys.add(awaited[thread].key)
        return sorted(keys) or None


def crossed_ranks(waits: Sequence[Collection[Key] | None], announced: Mapping[Key, Collection[int]]) -> list[int]:
    """Return the ranks whose threads can never continue.

    The wait-for graph is reduced: a rank that can continue may start further collectives, which may free other ranks.

    Args:
        waits: Collectives for which all threads of each rank wait, in rank order; None for a rank that can continue.
        announced: Pending collectives, each with the ranks that have started it.
    """
    everybody = set(range(len(waits)))
    free = {rank for rank in everybody if waits[rank] is None}

    def may_end(key: Key) -> bool:
        return free.issuperset(everybody.difference(announced.get(key, everybody)))

    while released := {rank for rank in everybody - free if any(map(may_end, waits[rank] or ()))}:
        free |= released
    return sorted(everybody - free)
