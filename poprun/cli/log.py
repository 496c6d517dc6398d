"""poprun's own words on its standard streams: answers, and log lines `HH:MM:SS.mmm <pid> POPRUN [E] text`."""

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
    """Return the level that `-v` (1) and `-vv` (2), or else the variable POPRUN_LOG_LEVEL, ask for."""
    if verbosity:
        return Level.INFO if verbosity == 1 else Level.DEBUG
    name = environ.get(LEVEL_VARIABLE, "").upper()
    return Level[name] if name in Level.__members__ else Level.WARN


def fault_of_level(environ: Mapping[str, str]) -> str:
    """Return what is wrong with the variable POPRUN_LOG_LEVEL; empty if nothing is."""
    name = environ.get(LEVEL_VARIABLE, "")
    if not name or name.upper() in Level.__members__:
        return ""
    return f"{LEVEL_VARIABLE} is {name!r}, which is no level; use one of {', '.join(Level.__members__)}"


@dataclass(frozen=True)
class Log:
    """Writes lines, those that are wanted. While a job runs its supervisor does that, in step with the output.

    Attributes:
        level: what is shown.
        descriptor: where to; standard error.
    """

    level: Level = Level.WARN
    descriptor: int = 2

    def error(self, text: str) -> None:
        """Say why the command failed."""
        self._write(Level.ERROR, text)

    def warn(self, text: str) -> None:
        """Say what is probably not meant."""
        self._write(Level.WARN, text)

    def info(self, text: str) -> None:
        """Say what happens, at `-v`."""
        self._write(Level.INFO, text)

    def debug(self, text: str) -> None:
        """Say how it happens, at `-vv`."""
        self._write(Level.DEBUG, text)

    def _write(self, level: Level, text: str) -> None:
        if level <= self.level:
            write_all(self.descriptor, format_line(level, text).encode(errors="surrogateescape"))


def format_line(level: Level, text: str) -> str:
    """Format one log line. A line break in the text begins a new log line; control characters are escaped."""
    head = f"{clock_text(time.time())} {os.getpid()} POPRUN [{level.name[0]}] "
    return "".join(f"{head}{without_controls(line)}\n" for line in text.splitlines() or [""])


def clock_text(now_s: float) -> str:
    """Return the local time with milliseconds.

    Args:
        now_s: seconds since 1970.
    """
    return f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{int(now_s * 1000) % 1000:03d}"


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything; give up silently where nobody reads any more."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return


def show(text: str, descriptor: int = 1) -> None:
    """Write a text and a line end; words of the user that are not UTF-8 come out as they are.

    Raises:
        OutputError: it cannot be written, because the disk is full.
        SystemExit: nobody reads it any more, as with `| head`.
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
