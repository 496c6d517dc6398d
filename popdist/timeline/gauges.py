"""The resources that a process uses on its host, as the kernel counts them: memory, CPU time, waits and load."""

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
"""Upper limit of a gauge's CPU time, as a part of one core."""


@final
class Gauge:
    """A repeated reading; the longer it takes, the more rarely it is repeated.

    Args:
        read: Function that returns numbers by name.
        now_s: Clock.
        spent_s: Clock of this thread's CPU time.
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
        """Read and pass each number to `tell`, unless the last reading is too recent and `is_last` is false."""
        if self._now_s() < self._again_at_s and not is_last:
            return
        before_s = self._spent_s()
        for name, number in self._read().items():
            tell(name, number)
        self._again_at_s = self._now_s() + (self._spent_s() - before_s) / LARGEST_SHARE


def read_gauges() -> dict[str, float]:
    """Return the available numbers: resident bytes, CPU seconds, seconds of waiting for a core, and the host's load."""
    found = {CPU_TIME: time.process_time(), HOST_LOAD: os.getloadavg()[0]}
    with suppress(OSError):
        found[MEMORY] = float(_line_of(_STATM).split()[1]) * _PAGE_BYTES
    if (waited := _core_wait_s()) is not None:
        found[CORE_WAIT] = waited
    return found


def _core_wait_s() -> float | None:
    """Return how long the main thread was ready to run but had no core; None if the kernel does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(_line_of(_SCHEDSTAT.format(os.getpid())).split()[1]) / 1e9
    return None


def _line_of(path: str) -> bytes:
    """Read a file of /proc, without the layers of `open`, which would take longer than the kernel."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _LONGEST_LINE)
    finally:
        os.close(file)
