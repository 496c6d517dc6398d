"""Cutting a program's output into whole lines, without holding back for ever what has no line end."""

from __future__ import annotations

LONGEST_SILENCE_S = 0.2
LONGEST_LINE_BYTES = 8 << 20


class LineBuffer:
    """Holds the last, unfinished line of one stream.

    A piece without line end is let go when nothing has been added for `LONGEST_SILENCE_S`, so that a prompt
    appears. Of a line that is redrawn with carriage returns, as progress bars do, everything but the newest
    state is let go after the same time even without silence.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._oldest_s = 0.0
        self._newest_s = 0.0

    def feed(self, data: bytes, now_s: float) -> bytes:
        """Add output; return the whole lines that are complete now."""
        if not self._held:
            self._oldest_s = now_s
        self._newest_s = now_s
        self._held += data
        if len(self._held) > LONGEST_LINE_BYTES:
            return self._take(len(self._held))
        return self._take(self._held.rfind(b"\n") + 1)

    def expire(self, now_s: float) -> bytes:
        """What has waited long enough at this time."""
        if not self._held or now_s < self.deadline_s():
            return b""
        if now_s >= self._newest_s + LONGEST_SILENCE_S:
            return self._take(len(self._held))
        self._oldest_s = now_s
        return self._take(max(self._held.rfind(b"\r"), 0))

    def deadline_s(self) -> float:
        """When `expire` has to be called next; infinite when nothing is held."""
        if not self._held:
            return float("inf")
        redrawn = self._held.find(b"\r", 1) > 0
        return (self._oldest_s if redrawn else self._newest_s) + LONGEST_SILENCE_S

    def flush(self) -> bytes:
        """Everything that is held, at the end."""
        return self._take(len(self._held))

    def _take(self, length: int) -> bytes:
        taken = bytes(self._held[:length])
        del self._held[:length]
        return taken
