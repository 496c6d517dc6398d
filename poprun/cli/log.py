"""poprun's own messages: answers, and log lines of the form `HH:MM:SS.mmm <pid> POPRUN [E] text`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from poprun.cli.wording import without_controls
from poprun.errors import OutputError

LEVEL_VARIABLE = "POPRUN_LOG_LEVEL"
"""Level of poprun's own lines: `ERROR`, `WARN`, `INFO`, `DEBUG` or `TRACE`. Default: `WARN`."""


class Level(IntEnum):
    """The importance of a log line; a line is shown if its level is at most the log's."""

    ERROR = 0
    WARN = 1
    INFO = 2
    DEBUG = 3
    TRACE = 4


def level_from(verbosity: int, environ: Mapping[str, str]) -> Level:
    """Return the level of `-v` (1) or `-vv` (2); with neither (0), the level that POPRUN_LOG_LEVEL names."""
    if verbosity:
        return Level.INFO if verbosity == 1 else Level.DEBUG
    name = environ.get(LEVEL_VARIABLE, "").upper()
    return Level[name] if name in Level.__members__ else Level.WARN


def fault_of_level(environ: Mapping[str, str]) -> str:
    """Describe the fault in the value of POPRUN_LOG_LEVEL; empty if the value is right."""
    name = environ.get(LEVEL_VARIABLE, "")
    if not name or name.upper() in Level.__members__:
        return ""
    return f"{LEVEL_VARIABLE} is {name!r}, which is no log level; use one of {', '.join(Level.__members__)}"


@dataclass(frozen=True)
class Log:
    """A writer of log lines. While a job runs, its supervisor writes the lines instead, in step with the output.

    Attributes:
        level: The least important level that is shown.
        descriptor: The file descriptor to write to; 2 is standard error.
    """

    level: Level = Level.WARN
    descriptor: int = 2

    def error(self, text: str) -> None:
        """Log the reason why the command failed."""
        self._write(Level.ERROR, text)

    def warn(self, text: str) -> None:
        """Log something that is probably a mistake."""
        self._write(Level.WARN, text)

    def info(self, text: str) -> None:
        """Log what happens; shown with `-v`."""
        self._write(Level.INFO, text)

    def debug(self, text: str) -> None:
        """Log how it happens; shown with `-vv`."""
        self._write(Level.DEBUG, text)

    def _write(self, level: Level, text: str) -> None:
        if level <= self.level:
            write_all(self.descriptor, format_line(level, text).encode(errors="surrogateescape"))


def format_line(level: Level, text: str) -> str:
    """Format log lines, one for each line of the text; control characters are escaped."""
    head = f"{clock_text(time.time())} {os.getpid()} POPRUN [{level.name[0]}] "
    return "".join(f"{head}{without_controls(line)}\n" for line in text.splitlines() or [""])


def clock_text(now_s: float) -> str:
    """Return the local time with milliseconds.

    Args:
        now_s: Seconds since 1970.
    """
    return f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{int(now_s * 1000) % 1000:03d}"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; give up silently if the reader has gone."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return


def show(text: str, descriptor: int = 1) -> None:
    """Write a text and a line end; words of the user that are not UTF-8 are written unchanged.

    Raises:
        OutputError: The text cannot be written, for example because the disk is full.
        SystemExit: The reader has gone, as with `| head`.
    """
    data = f"{text}\n".encode(errors="surrogateescape")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        name = "standard output" if descriptor == 1 else "standard error"
        raise OutputError(f"{name} cannot be written: {error.strerror}; nothing was started") from None
