"""What the user wants to be said about a job when it is over. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poprun.cli.log import Level
from poprun.errors import UsageError

FILE_PREFIX = "json:"
_YES = ("yes", "on", "true", "1")
_NO = ("no", "off", "false", "0")


@dataclass(frozen=True)
class SummaryAsked:
    """What the user wants.

    Attributes:
        lines: whether lines are shown; None: where standard error is a terminal.
        file: which file gets all of it as JSON; "": none.
    """

    lines: bool | None = None
    file: str = ""

    def shows_lines(self, is_terminal: bool, level: Level, environ: Mapping[str, str]) -> bool:
        """Whether lines are shown; unasked they are where somebody looks who has not said that only errors count."""
        if self.lines is not None:
            return self.lines
        return is_terminal and level >= Level.WARN and environ.get("TERM", "dumb") != "dumb"


def read_summary(text: str) -> SummaryAsked:
    """What `--summary` says; "" where it is not given.

    Raises:
        UsageError: nothing that can be.
    """
    if not text:
        return SummaryAsked()
    if text.lower() in (*_YES, *_NO):
        return SummaryAsked(lines=text.lower() in _YES)
    file = text.removeprefix(FILE_PREFIX)
    if not text.startswith(FILE_PREFIX) or not file:
        raise UsageError(f"--summary is {text!r}; use yes, no or {FILE_PREFIX}FILE")
    return SummaryAsked(file=file)
