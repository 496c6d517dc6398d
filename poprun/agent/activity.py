"""Whether the program of an instance is stopped, and whether it uses CPU time. For the agent: loads nothing slow."""

from __future__ import annotations

import os

from poprun.ipc.processes import descendants, state_of

LOOK_S = 1.0
"""How often all processes of an instance are looked at, which takes a moment."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NEVER = float("-inf")


class Activity:
    """What the processes of one instance do.

    A program may be started by others, such as `sh -c` or `numactl`: then the process that keeps the progress record is
    the one that counts, and before there is one, whatever is at the end of the line of only children.

    Args:
        pid: what the agent has started.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._worker = pid
        self._effort = 0.0
        self._waits_for_core = 0
        self._looked_at_s = _NEVER

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the program; one that a debugger holds is not meant."""
        return b"T" in {state_of(self._pid), state_of(self._worker)}

    @property
    def worker(self) -> int:
        """The process that counts."""
        return self._worker

    def note_owner(self, pid: int) -> None:
        """The process that keeps the progress record is this one."""
        self._worker = pid

    def effort(self, now_s: float) -> float:
        """A number that grows while the processes of the program use CPU time, or wait for a core.

        It is as it was `LOOK_S` ago at the most.
        """
        if now_s >= self._looked_at_s + LOOK_S:
            self._looked_at_s = now_s
            self._look()
        return self._effort

    def _look(self) -> None:
        found, is_line = [self._pid], True
        for pid in found:
            children = children_of(pid)
            is_line = is_line and len(children) <= 1
            found += [child for child in children if child not in found]
        if is_line:
            self._worker = found[-1]
        self._waits_for_core += any(state_of(pid) == b"R" for pid in found)
        self._effort = sum(map(_cpu_s, found)) + self._waits_for_core


def children_of(pid: int) -> list[int]:
    """The children of a process; all its descendants where the kernel does not list children (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except ProcessLookupError:
        return found
    except OSError:
        return found if os.path.exists("/proc/thread-self/children") else descendants(pid)
    return found


def _cpu_s(pid: int) -> float:
    """That of a process and of its children that have ended; see proc(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            times = file.read().rpartition(b")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, times)) / _TICKS_PER_S
