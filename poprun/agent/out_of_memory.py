"""Whether the kernel has ended processes here because memory had run out: the counter of this process's cgroup."""

from __future__ import annotations

import os

RECENT_S = 5.0
"""The counter may rise so long before the end of the process that was killed: it has memory to give back."""
_NEVER = -float("inf")


class OutOfMemory:
    """Looks at the counter from time to time; where there is none, nothing is ever found.

    Args:
        cgroups: what the kernel says about the cgroups of this process, see cgroups(7).
        root: where these are mounted.
    """

    def __init__(self, cgroups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> None:
        self._file = next(filter(None, (_open_counter(path) for path in _candidates(cgroups, root))), -1)
        self._count = self._read()
        self._risen_at_s = _NEVER

    def look(self, now_s: float) -> None:
        """Take note of the counter."""
        count = self._read()
        if count != self._count:
            self._count, self._risen_at_s = count, now_s

    def has_just_killed(self, now_s: float) -> bool:
        """Whether it has risen within `RECENT_S`."""
        self.look(now_s)
        return now_s - self._risen_at_s <= RECENT_S

    def _read(self) -> int:
        return _count_in(self._file) or 0


def _candidates(cgroups: str, root: str) -> list[str]:
    """Files that may hold the counter, first those of this process's own cgroup, then, as in a container, of all."""
    try:
        with open(cgroups) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    own = [f"{root}{path}/memory.events" for number, _, path in lines if number == "0"]
    own += [f"{root}/memory{path}/memory.oom_control" for _, names, path in lines if "memory" in names.split(",")]
    return [*own, f"{root}/memory.events", f"{root}/memory/memory.oom_control"]


def _open_counter(path: str) -> int | None:
    """A descriptor of a file with a line `oom_kill N`; None if it is not there or has none."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    if _count_in(file) is None:
        os.close(file)
        return None
    return file


def _count_in(file: int) -> int | None:
    try:
        words = os.pread(file, 4096, 0).split() if file >= 0 else []
    except OSError:
        return None
    return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else None
