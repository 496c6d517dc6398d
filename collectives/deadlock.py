"""Named collectives that wait for each other for ever: what the threads of each rank wait for, and who cannot go on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

Key = tuple[str, int]  # a tensor's name, and how often it was used before


class Awaited(Protocol):
    """A collective that a thread waits for."""

    key: Key

    def done(self) -> bool:
        """Return whether it has ended."""


class WaitingThreads:
    """The threads of one rank that may start named collectives, and what they wait for.

    These are the threads that have started one before, and all that are no daemons: a daemon that has not serves some
    library. Threads that Python does not list have to be announced (`expect_others`). One thread at a time calls the
    methods, but for `until`.
    """

    def __init__(self) -> None:
        self._starters: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._awaited: dict[threading.Thread, Awaited] = {}
        self._expects_others = False

    def expect_others(self) -> None:
        """Note that some thread may still come of which nothing is known yet."""
        self._expects_others = True

    def add_starter(self) -> None:
        """Note that the calling thread starts collectives."""
        self._starters.add(threading.current_thread())

    @contextmanager
    def until(self, awaited: Awaited) -> Iterator[None]:
        """Note, for the block, that the calling thread waits until `awaited` has ended."""
        thread = threading.current_thread()
        self._awaited[thread] = awaited
        try:
            yield
        finally:
            self._awaited.pop(thread, None)

    def if_all_wait(self) -> list[Key] | None:
        """Return what they wait for, or None if one of them can go on by itself."""
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
    """Return the ranks of which no thread can ever go on.

    Args:
        waits: what all threads of each rank wait for, in rank order; None where one of them can go on.
        announced: what is pending, and the ranks that have started it.
    """
    everybody = set(range(len(waits)))
    free = {rank for rank in everybody if waits[rank] is None}

    def may_end(key: Key) -> bool:
        return free.issuperset(everybody.difference(announced.get(key, everybody)))

    while released := {rank for rank in everybody - free if any(map(may_end, waits[rank] or ()))}:
        free |= released
    return sorted(everybody - free)
