"""The program's output: read at a suitable pace, cut into lines, and sent to poprun."""

from __future__ import annotations

import os
import select

from poprun.agent.link import ControlLink
from poprun.ipc import wire
from poprun.ipc.streams import PIPE_BYTES, enlarge

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load
if TYPE_CHECKING:
    from collections.abc import Callable

_NEVER = float("inf")


class ProgramOutput:
    """The program's standard output and error on their way to poprun.

    Args:
        descriptors: The reading ends of standard output and error.
        poll: The poll object of the agent's loop; during a pause the descriptors are not registered.
        link: The connection to poprun.
        now_s: The clock.
    """

    def __init__(
        self, descriptors: list[int], poll: select.poll, link: ControlLink, now_s: Callable[[], float]
    ) -> None:
        self._kinds = dict(zip(descriptors, (wire.STDOUT, wire.STDERR), strict=True))
        self._lines = {descriptor: LineBuffer(silence_s(os.isatty(descriptor))) for descriptor in descriptors}
        self._poll = poll
        self._link = link
        self._now_s = now_s
        self._pace = Pace(min(map(enlarge, descriptors)))
        self._read_bytes = 0
        self._read_at_s = _NEVER  # the end of the pause, if there is one
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLIN)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._kinds

    @property
    def deadline_s(self) -> float:
        """The time of the next call of `keep_pace` or `let_go`, even without output."""
        return min([self._read_at_s, *(lines.deadline_s() for lines in self._lines.values())])

    def forward(self, descriptor: int) -> None:
        """Read the available output, and send its whole lines."""
        try:
            data = os.read(descriptor, PIPE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a terminal that its last writer has closed
            data = b""
        if not data:
            self._close(descriptor)
            return
        self._read_bytes += len(data)
        self._send(descriptor, self._lines[descriptor].feed(data, self._now_s()))

    def keep_pace(self, now_s: float) -> None:
        """Read at the end of a pause, and begin a pause if readings follow each other fast."""
        if now_s >= self._read_at_s:
            for descriptor in list(self._kinds):
                self.forward(descriptor)
        elif not self._read_bytes:
            return
        pause_s = self._pace.pause_s(now_s, self._read_bytes) if self._read_bytes else 0.0
        self._read_bytes = 0
        if pause_s and self._read_at_s == _NEVER:
            for descriptor in self._kinds:
                self._poll.unregister(descriptor)
        elif not pause_s and self._read_at_s != _NEVER:
            for descriptor in self._kinds:
                self._poll.register(descriptor, select.POLLIN)
        self._read_at_s = now_s + pause_s if pause_s else _NEVER

    def let_go(self, now_s: float) -> None:
        """Send pieces of lines that have waited long enough, unless more output has come in the meantime."""
        for descriptor, lines in list(self._lines.items()):
            if now_s >= lines.deadline_s():
                self.forward(descriptor)
                if descriptor in self._kinds:
                    self._send(descriptor, lines.expire(now_s))

    def drain(self) -> None:
        """Forward all available output, including pieces of lines."""
        ready = select.poll()
        for descriptor in list(self._kinds):
            ready.register(descriptor, select.POLLIN)
            while descriptor in self._kinds and any(fd == descriptor for fd, _ in ready.poll(0)):
                self.forward(descriptor)
                if descriptor not in self._kinds:
                    ready.unregister(descriptor)
            if descriptor in self._kinds:
                ready.unregister(descriptor)
                self._send(descriptor, self._lines[descriptor].flush())

    def _close(self, descriptor: int) -> None:
        self._send(descriptor, self._lines[descriptor].flush())
        if self._read_at_s == _NEVER:
            self._poll.unregister(descriptor)
        os.close(descriptor)
        del self._kinds[descriptor], self._lines[descriptor]

    def _send(self, descriptor: int, data: bytes) -> None:
        if data:
            self._link.send(wire.pack(self._kinds[descriptor], data))


PAUSE_S = 0.05
"""The length of a pause. At 1 MB/s, 50 kB gather in this time; the delay is not visible."""
AT_ONCE = 20
"""The number of readings without delay before pauses begin, so that the two streams keep their order."""


class Pace:
    """The pauses between readings of the program's output.

    Every reading wakes the agent and poprun, whatever its size. Thousands of lines a second, each read alone, would
    take a quarter of a core from the program (benchmarks/output.py).

    Args:
        capacity_bytes: Bytes that the program can write before it blocks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._much_bytes = capacity_bytes // 2
        self._left = float(AT_ONCE)
        self._at_s = 0.0

    def pause_s(self, now_s: float, read_bytes: int) -> float:
        """Return the time until the next reading; 0 for a program that would block otherwise."""
        left = self._left + (now_s - self._at_s) / PAUSE_S
        self._at_s = now_s
        self._left = AT_ONCE if read_bytes > self._much_bytes else min(max(left, 1.0), AT_ONCE) - 1.0
        return 0.0 if self._left >= 1.0 else PAUSE_S


LONGEST_SILENCE_S = 0.2
UNSEEN_SILENCE_S = 1.0
REDRAW_S = 0.2
LONGEST_LINE_BYTES = 8 << 20


class LineBuffer:
    """The last, unfinished line of one stream.

    A piece of a line is released after some time without new output, so that a prompt appears. Progress bars
    redraw a line with carriage returns. Of such a line, all but the newest state is released after `REDRAW_S`.

    Args:
        silence_s: Seconds without new output after which a piece is released; the function `silence_s` chooses them.
    """

    def __init__(self, silence_s: float = LONGEST_SILENCE_S) -> None:
        self._silence_s = silence_s
        self._held = bytearray()  # without any line end
        self._is_redrawn = False
        self._oldest_s = 0.0
        self._newest_s = 0.0

    def feed(self, data: bytes, now_s: float) -> bytes:
        """Add output, and return the lines that are complete now."""
        whole_bytes = data.rfind(b"\n") + 1
        taken = self._take(len(self._held)) + data[:whole_bytes] if whole_bytes else b""
        self._hold(data[whole_bytes:], now_s)
        return taken + self.flush() if len(self._held) > LONGEST_LINE_BYTES else taken

    def expire(self, now_s: float) -> bytes:
        """Return the part of the held line that has waited long enough."""
        if not self._held or now_s < self.deadline_s():
            return b""
        if now_s >= self._newest_s + self._silence_s:
            return self._take(len(self._held))
        self._oldest_s = now_s
        return self._take(max(self._held.rfind(b"\r"), 0))

    def deadline_s(self) -> float:
        """Return the time of the next call of `expire`; infinite if nothing is held."""
        if not self._held:
            return float("inf")
        silent_s = self._newest_s + self._silence_s
        return min(silent_s, self._oldest_s + REDRAW_S) if self._is_redrawn else silent_s

    def flush(self) -> bytes:
        """Return everything that is held; called at the end of the output."""
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
    """Return how long a piece of a line is held back.

    Python's unbuffered `print` writes a line and its end separately. With more processes than cores, a program may lose
    its core for some tenths of a second in between. A piece released by then is torn if another instance writes. If
    standard output is not a terminal, no user waits for a prompt, so pieces are held longer.
    """
    return LONGEST_SILENCE_S if is_terminal else UNSEEN_SILENCE_S
