"""How fast instances make steps at present. Pure."""

from __future__ import annotations

from collections import deque

from popdist.records.progress import Made

APART_S = 1.0
"""What is kept lies so far apart at least."""
_KEPT = 8


class Recent:
    """Keeps for each instance what it had made lately."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Made]] = {}

    def note(self, instance: int, made: Made) -> None:
        """An instance has made this so far."""
        if not made.steps:
            return
        kept = self._kept.setdefault(instance, deque(maxlen=_KEPT))
        if not kept or made.to_s >= kept[-1].to_s + APART_S:
            kept.append(made)

    def rates(self, instance: int, made: Made, now_s: float) -> tuple[float, float] | None:
        """Steps and samples of an instance per second; None before two steps.

        They fall once the next step takes longer than those before.

        Args:
            instance: which.
            made: what it has made so far.
            now_s: the time.
        """
        kept = self._kept.get(instance)
        if not kept:
            return None
        before = next((each for each in kept if each.steps < made.steps), None) if made.steps > 1 else None
        if before is None:
            return None
        steps = made.steps - before.steps
        elapsed_s = made.to_s - before.to_s
        overdue_s = now_s - made.to_s - elapsed_s / steps
        elapsed_s += max(overdue_s, 0.0)
        return (steps / elapsed_s, (made.samples - before.samples) / elapsed_s) if elapsed_s > 0 else None
