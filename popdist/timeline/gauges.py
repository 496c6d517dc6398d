"""The use that a process makes of its host: memory, time of cores, and waits for a core. Linux only.

And the interval at which they are read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import final

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM, _SCHEDSTAT = "/proc/self/statm", "/proc/self/task/{}/schedstat"
_LONGEST_LINE = 200

MEMORY, CPU_TIME, CORE_WAIT, HOST_LOAD = "memory", "cpu time", "wait for cores", "host load"

LARGEST_SHARE = 0.001
"""No gauge takes more than this part of a core's time."""


@final
class Gauge:
    """A reading that is repeated, the more rarely the longer it takes.

    Args:
        read: returns numbers by their names.
        now_s: a clock.
        spent_s: how much time of a core this thread has taken.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, float]],
        now_s: Callable[[], float] = time.monotonic,
        spent_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read = read
        self._now_s = now_s
        self._spent_s = spent_s
        self._again_at_s = float("-inf")

    def look(self, tell: Callable[[str, float], None], is_last: bool = False) -> None:
        """Read it, unless that was done only just now and this is not the last time; `tell` is given each number."""
        if self._now_s() < self._again_at_s and not is_last:
            return
        before_s = self._spent_s()
        for name, number in self._read().items():
            tell(name, number)
        self._again_at_s = self._now_s() + (self._spent_s() - before_s) / LARGEST_SHARE


def read_gauges() -> dict[str, float]:
    """Return what can be read: bytes that are resident, seconds since the start of the process, and the host's load."""
    found = {CPU_TIME: time.process_time(), HOST_LOAD: os.getloadavg()[0]}
    with suppress(OSError):
        found[MEMORY] = float(_line_of(_STATM).split()[1]) * _PAGE_BYTES
    if (waited := _core_wait_s()) is not None:
        found[CORE_WAIT] = waited
    return found


def _core_wait_s() -> float | None:
    """Return how long the main thread was ready to run and was not; None where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(_line_of(_SCHEDSTAT.format(os.getpid())).split()[1]) / 1e9
    return None


def _line_of(path: str) -> bytes:
    """Return what such a file says; without the layers of `open`, which cost more than the kernel takes for it."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _LONGEST_LINE)
    finally:
        os.close(file)
