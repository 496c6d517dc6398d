"""What each instance has written last on its standard error, and the line of it that says why it failed. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from poprun.ipc.facts import EndKind, Facts, Verdict

KEPT_BYTES = 8192
_LONGEST_TEXT = 300
_FAR_LINES = 20
"""An exception with so much behind it is not what the program ended by."""

_FRAMES = ("Traceback (most recent call last):", '  File "')
_EXCEPTION = re.compile(r"[^\W\d][\w.]*(: .*)?")


class LastLines:
    """Keeps the end of every instance's standard error."""

    def __init__(self) -> None:
        self._ends: dict[int, bytes] = {}

    def take(self, instance: int, data: bytes) -> None:
        """Take in what an instance has written."""
        self._ends[instance] = (self._ends.get(instance, b"") + data[-KEPT_BYTES:])[-KEPT_BYTES:]

    def describe_cause(self, verdict: Verdict, facts: Sequence[Facts]) -> str:
        """One line about the instance to blame and what it has said, to stand behind all that others have said.

        Empty where it is alone, was ended from outside, or has said nothing about it.
        """
        if verdict.instance is None or len(facts) < 2:
            return ""
        blamed = facts[verdict.instance]
        lines = _lines_of(self._ends.get(blamed.index, b""))
        who = f"first cause: instance {blamed.index} on host {blamed.host}"
        status = f"exit status {verdict.exit_status}"
        ending = blamed.ending
        if ending is not None and (ending.kind is not EndKind.EXIT or ending.is_success):
            return ""
        if exception := find_exception(lines):
            return f"{who}: {_cut(exception)} ({status})"
        return f"{who} ({status}), which wrote last: {_cut(lines[-1])}" if lines and ending is not None else ""


def find_exception(lines: Sequence[str]) -> str:
    """The first line of the last exception of which there is a traceback near the end; empty if there is none."""
    found, found_at, is_trace = "", 0, False
    for position, line in enumerate(lines):
        if line.startswith(_FRAMES):
            is_trace = True
        elif is_trace and line[:1] not in (" ", "\t"):
            is_trace = False
            if _EXCEPTION.fullmatch(line):
                found, found_at = line, position
    return found if len(lines) - found_at <= _FAR_LINES else ""


def _lines_of(data: bytes) -> list[str]:
    """All that are not empty; of a line that was redrawn its last state."""
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in data.decode(errors="replace").split("\n"))
    return [line for line in lines if line]


def _cut(line: str) -> str:
    shown = "".join(each if each.isprintable() else "?" for each in line.strip())
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}..."
