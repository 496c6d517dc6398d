"""The resident memory of this process, now and at its peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20
RESET_HIGH_WATER_MARK = "5"  # see proc_pid_clear_refs(5)


def resident_bytes() -> int:
    """Return the resident bytes of this process; memory shared with other processes counts in full."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the peak of resident bytes since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Reset the peak; if that is not allowed, print that the peak counts from the start of the process."""
    try:
        Path("/proc/self/clear_refs").write_text(RESET_HIGH_WATER_MARK)
    except OSError:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        if largest > resident_bytes():
            print("the peak of memory cannot be reset here, so it counts from the process's start", file=sys.stderr)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))
