"""What a process takes of its host: memory, time of cores, and time for which it waited for a core. Linux only."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM, _TASKS = Path("/proc/self/statm"), Path("/proc/self/task")

MEMORY, CPU_TIME, CORE_WAIT, HOST_LOAD = "memory", "cpu time", "wait for cores", "host load"


def read_gauges() -> dict[str, float]:
    """What can be read: bytes that are resident, seconds since the start of the process, and the host's load."""
    found = {CPU_TIME: time.process_time(), HOST_LOAD: os.getloadavg()[0]}
    with suppress(OSError):
        found[MEMORY] = float(_STATM.read_text().split()[1]) * _PAGE_BYTES
    if (waited := _core_wait_s()) is not None:
        found[CORE_WAIT] = waited
    return found


def _core_wait_s() -> float | None:
    """How long the main thread was ready to run and was not; None where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int((_TASKS / str(os.getpid()) / "schedstat").read_text().split()[1]) / 1e9
    return None
