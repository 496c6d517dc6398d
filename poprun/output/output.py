"""The output of many instances on two descriptors, in tagged lines that are never torn or mixed."""

from __future__ import annotations

import os
import select
import stat
import time
from collections import deque

from poprun.cli.log import Level, format_line
from poprun.cli.wording import USUAL_COLUMNS, columns_of
from poprun.output.output_style import Cursor, OutputStyle

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from poprun.output.output_files import OutputFiles

TAIL_LINES = 50
MOST_HELD_BYTES = 16 << 20
_PLAIN = OutputStyle()
_WRITE_BYTES = 1 << 16
_ERASE_LINE = "\r\x1b[K"


class OutputStream:
    """One of poprun's own descriptors. It holds back output that the reader does not take yet.

    Attributes:
        is_closed: Whether nothing can be written any more.
        fault: The reason, unless the reader has gone.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        self.fault = ""
        self.is_terminal = os.isatty(descriptor)
        self._unwaiting = _open_unwaiting(descriptor)
        self._piece_bytes = _WRITE_BYTES if self._unwaiting >= 0 or stat.S_ISREG(_mode(descriptor)) else select.PIPE_BUF
        self._cursor = Cursor()
        self._status = ""
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        """The number of bytes that wait for the reader."""
        return len(self._held)

    def write_tagged(self, tag: bytes, data: bytes, clock: bytes = b"", writer: object = None) -> None:
        """Write whole lines, or a last piece of a line, with clock and tag in front of each (`Cursor.tagged`)."""
        self.show_status("")
        self._held += self._cursor.tagged(tag, data, clock, writer)
        self.flush()

    def write_own(self, data: bytes) -> None:
        """Write lines of poprun or mpirun, without tags."""
        self.show_status("")
        self.end_line()
        self._held += data
        self.flush()

    def show_status(self, text: str) -> None:
        """Show a text on a terminal until the next text or any output replaces it; "" erases the text."""
        if text == self._status or not self.is_terminal or self._cursor.is_inside_line:
            return
        columns = columns_of({}, self.descriptor) or USUAL_COLUMNS
        self._held += f"{_ERASE_LINE}{text[: columns - 1]}".encode()
        self._status = text
        self.flush()

    def end_line(self) -> None:
        """End a line that a writer left unfinished."""
        self._held += self._cursor.end_line()

    def flush(self) -> None:
        """Write as much as possible without blocking."""
        while self._held and not self.is_closed:
            try:
                written = self._write(bytes(self._held[: self._piece_bytes]))
            except BlockingIOError:
                return
            except OSError as error:
                self.is_closed = True
                self.fault = "" if isinstance(error, BrokenPipeError) else error.strerror or str(error)
                break
            del self._held[:written]
        if self.is_closed:
            self._held.clear()

    def close(self) -> None:
        """Close the additional descriptor, if one was opened."""
        if self._unwaiting >= 0:
            os.close(self._unwaiting)
            self._unwaiting = -1
            self._piece_bytes = select.PIPE_BUF

    def _write(self, data: bytes) -> int:
        if self._unwaiting >= 0:
            return os.write(self._unwaiting, data)
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self.descriptor, data)  # a ready pipe takes PIPE_BUF bytes, a file all bytes


class Output:
    """The output of the instances, as the user sees it and as files keep it.

    Args:
        only: The instance whose output is shown. None: all. Files keep the output of all instances.
        style: The appearance of the output, and the folder for files.

    Raises:
        UsageError: The files cannot be made.
    """

    def __init__(self, only: int | None = None, style: OutputStyle = _PLAIN) -> None:
        self.style = style
        self._files: OutputFiles | None = None
        if style.directory is not None:
            from poprun.output.output_files import OutputFiles  # takes some milliseconds to load, and few jobs need it

            self._files = OutputFiles(style.directory, len(style.hosts), self._warn)
        self.stdout = OutputStream(1)
        self.stderr = self.stdout if _same_file(1, 2) else OutputStream(2)
        self._only = only
        self._tails: dict[int, deque[bytes]] = {}
        self._has_shown = False

    @property
    def sinks(self) -> tuple[OutputStream, ...]:
        """The streams for both descriptors; a single one if both are the same file."""
        return (self.stdout,) if self.stderr is self.stdout else (self.stdout, self.stderr)

    @property
    def is_behind(self) -> bool:
        """Whether so much output is held back that the instances should wait."""
        return any(sink.held_bytes > MOST_HELD_BYTES for sink in self.sinks)

    def record(self, instance: int, descriptor: int, data: bytes) -> None:
        """Keep an instance's output in files, whether it is shown or not; called once for all output."""
        if self._files is not None:
            self._files.record(instance, descriptor, data)

    def show(self, instance: int, descriptor: int, data: bytes) -> None:
        """Show an instance's output; if the instance is silenced, keep the last lines of its standard error."""
        clock = self.style.clock(time.time())
        if self._files is not None:
            self._files.merge(self.style.tag(instance, descriptor), data, clock)
        if self._only is None or instance == self._only:
            self._write_tagged(instance, descriptor, data, clock)
        elif descriptor == 2:
            tail = self._tails.setdefault(instance, deque(maxlen=TAIL_LINES))
            tail.extend(data.splitlines(keepends=True))

    def show_status(self, text: str) -> None:
        """Show the job's state on a terminal, until an instance shows output."""
        self.stderr.show_status("" if self._has_shown else text)

    def show_own(self, descriptor: int, data: bytes) -> None:
        """Show lines of poprun or mpirun."""
        if self._files is not None:
            self._files.merge_own(data)
        self._sink(descriptor).write_own(data)

    def show_hidden_errors(self, instance: int) -> None:
        """Show the last lines of standard error of a silenced instance."""
        for line in self._tails.pop(instance, ()):
            self._write_tagged(instance, 2, line, self.style.clock(time.time()))

    def finish(self, limit_s: float | None) -> None:
        """Write the output that is held back; wait for a slow reader for ever, or at most `limit_s` for each piece."""
        if self._files is not None:
            self._files.close()
        for sink in self.sinks:
            if not self._is_plain(sink):
                sink.end_line()
            poll = select.poll()
            poll.register(sink.descriptor, select.POLLOUT)
            while sink.held_bytes and poll.poll(None if limit_s is None else limit_s * 1000):
                sink.flush()
            sink.close()

    def _write_tagged(self, instance: int, descriptor: int, data: bytes, clock: bytes) -> None:
        self._has_shown = True
        self.stderr.show_status("")  # erases the status, even if standard output is another terminal or a pipe
        sink = self._sink(descriptor)
        tag = b""
        if descriptor not in self.style.untagged:
            tag = self.style.tag(instance, descriptor, self.style.is_coloured(sink.is_terminal))
        sink.write_tagged(tag, data, clock, (instance, descriptor))

    def _is_plain(self, sink: OutputStream) -> bool:
        """Return whether a program reads one instance's bytes from this stream, so that no line end may be added."""
        return len(self.sinks) == 2 and sink is self.stdout and self.style.is_plain

    def _sink(self, descriptor: int) -> OutputStream:
        return self.stdout if descriptor == 1 else self.stderr

    def _warn(self, text: str) -> None:
        self.stderr.write_own(format_line(Level.WARN, text).encode(errors="surrogateescape"))


def is_piped() -> bool:
    """Return whether standard output is a pipe that standard error does not use too."""
    return stat.S_ISFIFO(_mode(1)) and not _same_file(1, 2)


def _open_unwaiting(descriptor: int) -> int:
    """Open the pipe or terminal of a descriptor again, to write without blocking; return -1 if that is impossible.

    The flag O_NONBLOCK on the descriptor itself would affect every program that shares it, such as the user's shell.
    """
    if not (stat.S_ISFIFO(_mode(descriptor)) or os.isatty(descriptor)):
        return -1
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return -1


def _mode(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_mode
    except OSError:
        return 0


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False
