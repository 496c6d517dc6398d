"""Cutting a program's output into whole lines, without holding back for ever what has no line end."""

from __future__ import annotations

LONGEST_SILENCE_S = 0.2
UNSEEN_SILENCE_S = 1.0
REDRAW_S = 0.2
LONGEST_LINE_BYTES = 8 << 20


class LineBuffer:
    """Holds the last, unfinished line of one stream.

    A piece without line end is let go when nothing has been added for some time, so that a prompt appears. Of a line
    that is redrawn with carriage returns, as progress bars do, everything but the newest state is let go after
    `REDRAW_S` even without silence.

    Args:
        silence_s: how long nothing has to be added; see the function of this name.
    """

    def __init__(self, silence_s: float = LONGEST_SILENCE_S) -> None:
        self._silence_s = silence_s
        self._held = bytearray()  # without any line end
        self._is_redrawn = False
        self._oldest_s = 0.0
        self._newest_s = 0.0

    def feed(self, data: bytes, now_s: float) -> bytes:
        """Add output; return the whole lines that are complete now."""
        whole_bytes = data.rfind(b"\n") + 1
        taken = self._take(len(self._held)) + data[:whole_bytes] if whole_bytes else b""
        self._hold(data[whole_bytes:], now_s)
        return taken + self.flush() if len(self._held) > LONGEST_LINE_BYTES else taken

    def expire(self, now_s: float) -> bytes:
        """What has waited long enough at this time."""
        if not self._held or now_s < self.deadline_s():
            return b""
        if now_s >= self._newest_s + self._silence_s:
            return self._take(len(self._held))
        self._oldest_s = now_s
        return self._take(max(self._held.rfind(b"\r"), 0))

    def deadline_s(self) -> float:
        """When `expire` has to be called next; infinite when nothing is held."""
        if not self._held:
            return float("inf")
        silent_s = self._newest_s + self._silence_s
        return min(silent_s, self._oldest_s + REDRAW_S) if self._is_redrawn else silent_s

    def flush(self) -> bytes:
        """Everything that is held, at the end."""
        return self._take(len(self._held))

    def _hold(self, data: bytes, now_s: float) -> None:
        held_bytes = len(self._held)
        if not held_bytes:
            self._oldest_s = now_s
        self._newest_s = now_s
        self._held += data
        self._is_redrawn = self._is_redrawn or self._held.find(b"\r", max(held_bytes, 1)) > 0

    def _take(self, length: int) -> bytes:
        """Take everything up to a line end, to the newest carriage return, or to the end."""
        taken = bytes(self._held[:length])
        del self._held[:length]
        self._is_redrawn = False
        return taken


def silence_s(is_terminal: bool) -> float:
    """How long a piece without line end is held back.

    Python's unbuffered `print` writes a line and its end separately; on a machine with more processes than cores a
    program may lose its core for some tenths of a second in between, and whatever has been let go is torn when
    another instance writes. Who does not look at a terminal can wait longer for a prompt.
    """
    return LONGEST_SILENCE_S if is_terminal else UNSEEN_SILENCE_S
