"""How much memory this process has, and had at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20
RESET_HIGH_WATER_MARK = "5"  # see proc_pid_clear_refs(5)


def resident_bytes() -> int:
    """What it has; what it shares with other processes counts for each of them."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """What it has had at most since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Let the peak begin anew; where that is not allowed it counts from the start of the process."""
    try:
        Path("/proc/self/clear_refs").write_text(RESET_HIGH_WATER_MARK)
    except OSError:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        if largest > resident_bytes():
            print("the peak of the memory cannot be reset here: it is that since the process began", file=sys.stderr)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))
