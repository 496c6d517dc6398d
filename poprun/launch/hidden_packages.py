"""Files of the user that stand before the packages of the same names in the path of a Python program."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PACKAGES = ("popdist", "strategies", "collectives", "poprun")
_OURS = Path(__file__).parents[2]
_WITH_WORD = ("-W", "-X", "--check-hash-based-pycs")
_WITHOUT_FOLDER = ("-I", "-P")


def warn_of_hidden(program: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each file that the program imports instead of a package.

    Args:
        program: its words.
        environ: the user's; Python has variables that decide where it looks.
    """
    folder = None if environ.get("PYTHONSAFEPATH") else folder_of(program)
    if folder is None:
        return
    for package in PACKAGES:
        for path in (f"{folder}/{package}/__init__.py", f"{folder}/{package}.py"):
            if os.path.exists(path) and not _is_ours(path, package):
                yield (
                    f"{path} hides the package {package} from the program, because Python looks into the folder of "
                    "the program first; rename it if the program needs the package"
                )
                break


def folder_of(program: Sequence[str]) -> str | None:
    """The folder in which a Python program looks first; None where there is no such program."""
    name = os.path.basename(program[0])
    if name.endswith(".py"):
        return os.path.dirname(os.path.realpath(program[0]))
    if not name.startswith("python"):
        return None
    words = iter(program[1:])
    for word in words:
        if word.startswith(_WITHOUT_FOLDER):
            return None
        if word.startswith(("-c", "-m")) or word == "-":
            return os.getcwd()
        if not word.startswith("-"):
            return os.path.dirname(os.path.realpath(word))
        if word in _WITH_WORD:
            next(words, None)
    return None


def _is_ours(path: str, package: str) -> bool:
    ours = _OURS / package / "__init__.py"
    return ours.exists() and os.path.samefile(path, ours)
