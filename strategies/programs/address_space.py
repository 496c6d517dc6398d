"""Limits of address space: where XLA runs into one it aborts the process without a word, so that is said before."""

from __future__ import annotations

import contextlib
import logging
import resource
from pathlib import Path

logger = logging.getLogger(__name__)

ROOM_BYTES = 5 << 28
"""What XLA's threads reserve, most of it never used, when its first program runs: 26 threads, each with a stack and a
region of malloc of 64 MiB. Measured on two cores: 1.2 GB with up to 8 replicas, and more with more of them."""
_THREADS = "tf_"  # of XLA; Linux knows the first 15 characters of their names


def warn_of_little_address_space() -> None:
    """Warn that the process will probably abort when XLA starts, because of `ulimit -v`; before it starts."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and not _has_started() and (fault := describe_lack(limit, _used_bytes())):
        logger.warning("%s", fault)


def describe_lack(limit: int, used: int) -> str:
    """What is to be said about a limit of so many bytes of which so many are used; empty if they will do."""
    if limit - used >= ROOM_BYTES:
        return ""
    return (
        f"this process may use {limit / 1e9:.2f} GB of address space (ulimit -v) and uses {used / 1e9:.2f} GB; XLA's "
        f"threads reserve {ROOM_BYTES / 1e9:.2f} GB and more, and it aborts where they cannot; raise the limit, or "
        "limit memory by a cgroup instead (systemd-run -p MemoryMax=..., Slurm's --mem)"
    )


def _has_started() -> bool:
    """Whether XLA has its threads already; JAX has no public way to ask."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            if name.read_text().startswith(_THREADS):
                return True
    return False


def _used_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
