"""What a process takes of its host: memory, time of cores, and time for which it waited for a core. Linux only."""

from __future__ import annotations

import os
import time
from contextlib import suppress

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM, _SCHEDSTAT = "/proc/self/statm", "/proc/self/task/{}/schedstat"
_LONGEST_LINE = 200

MEMORY, CPU_TIME, CORE_WAIT, HOST_LOAD = "memory", "cpu time", "wait for cores", "host load"


def read_gauges() -> dict[str, float]:
    """What can be read: bytes that are resident, seconds since the start of the process, and the host's load."""
    found = {CPU_TIME: time.process_time(), HOST_LOAD: os.getloadavg()[0]}
    with suppress(OSError):
        found[MEMORY] = float(_line_of(_STATM).split()[1]) * _PAGE_BYTES
    if (waited := _core_wait_s()) is not None:
        found[CORE_WAIT] = waited
    return found


def _core_wait_s() -> float | None:
    """How long the main thread was ready to run and was not; None where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(_line_of(_SCHEDSTAT.format(os.getpid())).split()[1]) / 1e9
    return None


def _line_of(path: str) -> bytes:
    """What such a file says; without the layers of `open`, which cost more than the kernel takes for it."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _LONGEST_LINE)
    finally:
        os.close(file)
