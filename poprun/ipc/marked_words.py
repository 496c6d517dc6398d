"""The program's words on mpirun's command line, written so that mpirun reads none of them. Pure.

mpirun (5.0.11) looks at all words up to a `--`, those behind the program too: it begins another program at `:`, takes
parameters from `--mca`, ends at a `--prtemca` that is the last word, and hands `--bind-to` on as `--bindto`.
"""

from __future__ import annotations

MARK = "+"
"""Stands before each word that could mean something to mpirun, and before those that begin with it themselves."""

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._")
_LAST_OF_ASCII = "\x7f"


def mark(word: str) -> str:
    """A word as mpirun gets it: as it is, where it begins like a name, a number or a path."""
    return word if word[:1] in _PLAIN or word[:1] > _LAST_OF_ASCII else MARK + word


def unmark(word: str) -> str:
    """The word that `mark` was given."""
    return word.removeprefix(MARK)
