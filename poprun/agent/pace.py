"""How often the output of a program is read: at once while it says little, in larger pieces while it says much."""

from __future__ import annotations

PAUSE_S = 0.05
"""At 1 MB/s 50 kB come together in this time; nobody sees the delay."""
AT_ONCE = 20
"""So many pieces are read without delay, and the streams keep their order, before pauses begin."""


class Pace:
    """Says after each reading how long to leave the program's output alone.

    Every reading wakes the agent and poprun, whatever its size: thousands of lines a second, each on its own, would
    take a quarter of a core from the program (benchmarks/output.py).

    Args:
        capacity_bytes: how much the program can write before it has to wait for us.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._much_bytes = capacity_bytes // 2
        self._left = float(AT_ONCE)
        self._at_s = 0.0

    def pause_s(self, now_s: float, read_bytes: int) -> float:
        """The time until the next reading; none for a program that writes so much that it would have to wait.

        Args:
            now_s: when output was read.
            read_bytes: how much.
        """
        left = self._left + (now_s - self._at_s) / PAUSE_S
        self._at_s = now_s
        self._left = AT_ONCE if read_bytes > self._much_bytes else min(max(left, 1.0), AT_ONCE) - 1.0
        return 0.0 if self._left >= 1.0 else PAUSE_S
