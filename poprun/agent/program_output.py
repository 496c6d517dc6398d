"""What the program writes: read at a pace that suits it, cut into lines, and sent to poprun."""

from __future__ import annotations

import os
import select

from poprun.agent.lines import LineBuffer, silence_s
from poprun.agent.link import Link
from poprun.agent.pace import Pace
from poprun.ipc import wire
from poprun.ipc.terminals import PIPE_BYTES, enlarge

TYPE_CHECKING = False  # that of `typing`, which takes too long to load
if TYPE_CHECKING:
    from collections.abc import Callable

_NEVER = float("inf")


class ProgramOutput:
    """Forwards the program's standard output and error.

    Args:
        descriptors: of the two.
        poll: wakes the agent when there is something to read; in a pause they are not in it.
        link: to poprun.
        now_s: the clock.
    """

    def __init__(self, descriptors: list[int], poll: select.poll, link: Link, now_s: Callable[[], float]) -> None:
        self._kinds = dict(zip(descriptors, (wire.STDOUT, wire.STDERR), strict=True))
        self._lines = {descriptor: LineBuffer(silence_s(os.isatty(descriptor))) for descriptor in descriptors}
        self._poll = poll
        self._link = link
        self._now_s = now_s
        self._pace = Pace(min(map(enlarge, descriptors)))
        self._read_bytes = 0
        self._read_at_s = _NEVER  # in a pause: when it is over
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            poll.register(descriptor, select.POLLIN)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._kinds

    @property
    def deadline_s(self) -> float:
        """When `keep_pace` or `let_go` has something to do, whatever comes."""
        return min([self._read_at_s, *(lines.deadline_s() for lines in self._lines.values())])

    def forward(self, descriptor: int) -> None:
        """Read what is there, and send what is whole lines of it."""
        try:
            data = os.read(descriptor, PIPE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose last writer has gone
            data = b""
        if not data:
            self._close(descriptor)
            return
        self._read_bytes += len(data)
        self._send(descriptor, self._lines[descriptor].feed(data, self._now_s()))

    def keep_pace(self, now_s: float) -> None:
        """Read at the end of a pause, and begin one when readings follow each other fast."""
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
        """Send pieces that have waited long enough, unless more has come while we waited for poprun to read."""
        for descriptor, lines in list(self._lines.items()):
            if now_s >= lines.deadline_s():
                self.forward(descriptor)
                if descriptor in self._kinds:
                    self._send(descriptor, lines.expire(now_s))

    def drain(self) -> None:
        """Forward all output that is there now, and pieces of lines too."""
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
