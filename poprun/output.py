"""Showing the output of many instances on two descriptors: tagged lines, never torn, never mixed."""

from __future__ import annotations

import os
import select
from collections import deque

TAIL_LINES = 50
MOST_HELD_BYTES = 16 << 20
_STREAMS = {1: "stdout", 2: "stderr"}
_PIECE_BYTES = select.PIPE_BUF  # what a pipe that is ready takes without blocking


class Cursor:
    """Who wrote the unfinished line that the cursor of a terminal, or the end of a file, stands on."""

    def __init__(self) -> None:
        self.owner: bytes = b""


class Sink:
    """One of poprun's own descriptors; it holds back what the reader does not take yet."""

    def __init__(self, descriptor: int, cursor: Cursor) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        self._cursor = cursor
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        """How much waits for the reader."""
        return len(self._held)

    def write_tagged(self, tag: bytes, data: bytes) -> None:
        """Write whole lines, or one last piece of a line, with the tag in front of each."""
        if self._cursor.owner != tag:
            self.end_line()
        *lines, piece = data.split(b"\n")
        for line in lines:
            self._write_line(tag, line + b"\n")
            self._cursor.owner = b""
        if piece:
            self._write_line(tag, piece)
            self._cursor.owner = tag
        self.flush()

    def end_line(self) -> None:
        """Finish a line that somebody left unfinished."""
        if self._cursor.owner:
            self._held += b"\n"
            self._cursor.owner = b""

    def write_own(self, data: bytes) -> None:
        """Write lines of poprun's own or of mpirun, untagged."""
        self.end_line()
        self._held += data
        self.flush()

    def flush(self) -> None:
        """Write what can be written without waiting."""
        while self._held and not self.is_closed and self._is_ready():
            try:
                written = os.write(self.descriptor, self._held[:_PIECE_BYTES])
            except OSError:
                self.is_closed = True
                break
            del self._held[:written]
        if self.is_closed:
            self._held.clear()

    def _write_line(self, tag: bytes, line: bytes) -> None:
        if not self._cursor.owner:
            self._held += tag
        # A redrawn line keeps its tag; the carriage return of a DOS line end is left alone.
        body = line.removesuffix(b"\r\n")
        self._held += body.replace(b"\r", b"\r" + tag) + line[len(body) :]

    def _is_ready(self) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(0))


class Output:
    """Everything that the user sees of the instances.

    Args:
        only: the instance whose output is shown; None: all.
    """

    def __init__(self, only: int | None = None) -> None:
        shared = Cursor()
        self.stdout = Sink(1, shared)
        self.stderr = Sink(2, shared if _same_file(1, 2) else Cursor())
        self._only = only
        self._tails: dict[int, deque[bytes]] = {}

    @property
    def sinks(self) -> tuple[Sink, Sink]:
        """Both descriptors."""
        return self.stdout, self.stderr

    @property
    def is_behind(self) -> bool:
        """Whether so much is held back that instances should be made to wait."""
        return any(sink.held_bytes > MOST_HELD_BYTES for sink in self.sinks)

    def show(self, instance: int, descriptor: int, data: bytes) -> None:
        """Show output of an instance, or, where it is silenced, remember the end of its standard error."""
        if self._only is None or instance == self._only:
            sink = self.stdout if descriptor == 1 else self.stderr
            sink.write_tagged(tag(instance, descriptor), data)
        elif descriptor == 2:
            tail = self._tails.setdefault(instance, deque(maxlen=TAIL_LINES))
            tail.extend(data.splitlines(keepends=True))

    def show_hidden_errors(self, instance: int) -> None:
        """Show the last lines of standard error of an instance that was silenced."""
        for line in self._tails.pop(instance, ()):
            self.stderr.write_tagged(tag(instance, 2), line)

    def finish(self, limit_s: float | None) -> None:
        """Write what is held back; wait for a slow reader for ever, or at most `limit_s` for each piece."""
        for sink in self.sinks:
            sink.end_line()
            poll = select.poll()
            poll.register(sink.descriptor, select.POLLOUT)
            while sink.held_bytes and poll.poll(None if limit_s is None else limit_s * 1000):
                sink.flush()


def tag(instance: int, descriptor: int) -> bytes:
    """What mpirun's --tag-output puts in front of a line, with the job number 1."""
    return f"[1,{instance}]<{_STREAMS[descriptor]}>:".encode()


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False
