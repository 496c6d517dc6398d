"""How much memory the program of an instance has: what is resident, shared memory included. For the agent."""

from __future__ import annotations

LOOK_S = 1.0
"""How often the kernel is asked."""
_KIB = 1024
_NEVER = float("-inf")


class Memory:
    """What the process of an instance that counts has, and what it has had at most."""

    def __init__(self) -> None:
        self._bytes = self._peak_bytes = 0
        self._looked_at_s = _NEVER

    def look(self, pid: int, now_s: float) -> tuple[int, int]:
        """How many bytes are resident, and how many have been; as it was `LOOK_S` ago at the most.

        Args:
            pid: of the process; that of one which has ended leaves what was known.
            now_s: the time.
        """
        if now_s >= self._looked_at_s + LOOK_S:
            self._looked_at_s = now_s
            found = _read(f"/proc/{pid}/status")
            self._bytes = found.get(b"VmRSS", 0)
            self._peak_bytes = max(self._peak_bytes, found.get(b"VmHWM", 0))
        return self._bytes, self._peak_bytes

    def note_end(self, most_kib: int) -> None:
        """A process of the instance has ended, which, or one of its children, had so much at most; see getrusage(2)."""
        self._bytes = 0
        self._peak_bytes = max(self._peak_bytes, most_kib * _KIB)


def _read(path: str) -> dict[bytes, int]:
    """The amounts in such a file, in bytes; see proc(5)."""
    try:
        with open(path, "rb") as file:
            pairs = (line.split(b":", 1) for line in file if line.startswith(b"Vm"))
            return {name: int(amount.split()[0]) * _KIB for name, amount in pairs}
    except OSError:
        return {}
