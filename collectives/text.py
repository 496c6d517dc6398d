"""Texts that somebody else has written, before they come into a line of a log or an error."""

from __future__ import annotations

MOST = 300
"""Characters that are kept of a text from a process that may be no worker of the job at all."""
MOST_OF_PEERS = 2000
"""Of one from a process that has shown that it is."""


def foreign(text: str, most: int = MOST) -> str:
    """The text on one line, what is not printable escaped, since terminals obey it, and the end cut off."""
    kept = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])
    return kept if len(text) <= most else f"{kept} ... ({len(text)} characters)"
