"""Statistics of an instance's processes: CPU time, stops, memory, kills for lack of memory. Imports nothing slow."""

from __future__ import annotations

import os

from poprun.ipc.processes import descendants, state_of

LOOK_S = 1.0
"""The interval between looks at all processes of an instance, because a look takes time."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NEVER = float("-inf")


class Activity:
    """The state and the CPU time of the processes below the process `pid`, which the agent has started.

    A command such as `sh -c` or `numactl` may start the actual program. So the worker is the process that keeps the
    progress record. Before there is a record, and if no process has several children, it is the last descendant.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._worker = pid
        self._effort = 0.0
        self._waits_for_core = 0
        self._looked_at_s = _NEVER

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the program; a stop by a debugger does not count."""
        return b"T" in {state_of(self._pid), state_of(self._worker)}

    @property
    def worker(self) -> int:
        """The process that runs the actual program."""
        return self._worker

    def note_owner(self, pid: int) -> None:
        """Note the process that keeps the progress record."""
        self._worker = pid

    def effort(self, now_s: float) -> float:
        """Return a number that grows while processes of the program use CPU time or wait for a core.

        The number is at most `LOOK_S` old.
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
    """Return the children of a process, or all descendants if the kernel lists no children (CONFIG_PROC_CHILDREN)."""
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
    """Return the CPU time of a process and of its ended children (proc(5))."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            times = file.read().rpartition(b")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, times)) / _TICKS_PER_S


_KIB = 1024


class MemoryUse:
    """The memory of an instance's worker process, now and at its peak."""

    def __init__(self) -> None:
        self._bytes = self._peak_bytes = 0
        self._looked_at_s = _NEVER

    def look(self, pid: int, now_s: float) -> tuple[int, int]:
        """Return the resident memory and its peak in bytes, both at most `LOOK_S` old.

        Args:
            pid: The process; after its end, the peak stays.
            now_s: The time.
        """
        if now_s >= self._looked_at_s + LOOK_S:
            self._looked_at_s = now_s
            found = _read(f"/proc/{pid}/status")
            self._bytes = found.get(b"VmRSS", 0)
            self._peak_bytes = max(self._peak_bytes, found.get(b"VmHWM", 0))
        return self._bytes, self._peak_bytes

    def note_end(self, most_kib: int) -> None:
        """Note the end of a process whose own or whose children's peak memory was `most_kib` (getrusage(2))."""
        self._bytes = 0
        self._peak_bytes = max(self._peak_bytes, most_kib * _KIB)


def _read(path: str) -> dict[bytes, int]:
    """Read the amounts of memory in a file of /proc (proc(5)), in bytes."""
    try:
        with open(path, "rb") as file:
            pairs = (line.split(b":", 1) for line in file if line.startswith(b"Vm"))
            return {name: int(amount.split()[0]) * _KIB for name, amount in pairs}
    except OSError:
        return {}


RECENT_S = 5.0
"""The longest time from a rise of the counter to the end of the killed process, which has memory to give back."""


class OutOfMemory:
    """The kernel's counter of kills for lack of memory; without a counter, no kill is ever found.

    Args:
        cgroups: Path of the file with this process's cgroups (cgroups(7)).
        root: The folder where cgroups are mounted.
    """

    def __init__(self, cgroups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> None:
        self._file = next(filter(None, (_open_counter(path) for path in _candidates(cgroups, root))), -1)
        self._count = self._read()
        self._risen_at_s = _NEVER

    def look(self, now_s: float) -> None:
        """Read the counter, and note whether it has risen."""
        count = self._read()
        if count != self._count:
            self._count, self._risen_at_s = count, now_s

    def has_just_killed(self, now_s: float) -> bool:
        """Return whether the counter has risen within `RECENT_S`."""
        self.look(now_s)
        return now_s - self._risen_at_s <= RECENT_S

    def _read(self) -> int:
        return _count_in(self._file) or 0


def _candidates(cgroups: str, root: str) -> list[str]:
    """Return the files that may hold the counter: of this process's cgroup, then of the root, as in a container."""
    try:
        with open(cgroups) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    own = [f"{root}{path}/memory.events" for number, _, path in lines if number == "0"]
    own += [f"{root}/memory{path}/memory.oom_control" for _, names, path in lines if "memory" in names.split(",")]
    return [*own, f"{root}/memory.events", f"{root}/memory/memory.oom_control"]


def _open_counter(path: str) -> int | None:
    """Open a file with a line `oom_kill N`; return None if there is no such file or line."""
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
