"""A file of lines that is gone on with: what it has of steps that are made again is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, final

from strategies.sinks.row import Row


class Said(NamedTuple):
    """What a line is of.

    Attributes:
        step: its step.
        names: of its numbers.
    """

    step: int
    names: frozenset[str]


SaidBy = Callable[[bytes], Said | None]
"""What a line says that is in a file; None where it cannot be read."""


@final
class ContinuedFile:
    """Appends lines, unbuffered.

    Args:
        path: of the file; its folder is made.
        start: with which every file begins that is none of something else.
        goes_on: whether this job has begun it.

    Raises:
        ValueError: the file that is there begins otherwise.
    """

    def __init__(self, path: Path, start: bytes, goes_on: bool) -> None:
        self.path = path
        self._goes_on = goes_on
        self._is_begun = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._refuse_others(start)

    @property
    def is_regular(self) -> bool:
        """Whether it can be read and cut; a pipe or a terminal cannot."""
        return stat.S_ISREG(os.fstat(self._file).st_mode)

    def append(self, data: bytes) -> None:
        """Write all of it.

        Raises:
            OSError: that is impossible; a part may be in the file.
        """
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def begin(self, first: Row, said_by: SaidBy, heading: int = 0) -> None:
        """Take out what comes again, from the line on where the first row belongs; the first call of it does.

        Where that is all of a file which this job has not begun, the file is kept under another name.

        Args:
            first: the first row that is about to be written.
            said_by: reads a line.
            heading: how many lines in front are of no step.
        """
        if self._is_begun or not self.is_regular:
            return
        self._is_begun = True
        position, is_all = self._place_of(first, said_by, heading)
        if is_all and not self._goes_on:
            self._set_aside()
            return
        if position < os.fstat(self._file).st_size:
            os.ftruncate(self._file, position)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Have these lines instead, or what there was if that is impossible."""
        beside = self.path.with_name(f"{self.path.name}.new")
        try:
            with beside.open("wb") as file:
                file.writelines(lines)
            os.chmod(beside, stat.S_IMODE(os.fstat(self._file).st_mode))
            os.replace(beside, self.path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        self._reopen()

    def lines(self) -> Iterable[bytes]:
        """Those that are in the file, each with its end."""
        with self.path.open("rb") as file:
            yield from file

    def close(self) -> None:
        """End."""
        os.close(self._file)

    def _refuse_others(self, start: bytes) -> None:
        begins = next(iter(self.lines()), b"")[: len(start)] if self.is_regular else b""
        if not start.startswith(begins):
            raise ValueError(f"the file is there, and does not begin with {start.decode()}; name another file")

    def _place_of(self, first: Row, said_by: SaidBy, heading: int) -> tuple[int, bool]:
        """Where the first row belongs, and whether nothing but headings is in front and something behind."""
        position, kept = 0, 0
        for number, line in enumerate(self.lines()):
            said = said_by(line) if number >= heading else None
            if not line.endswith(b"\n") or (said is not None and _comes_again(said, first)):
                return position, not kept and said is not None
            position += len(line)
            kept += number >= heading
        return position, False

    def _set_aside(self) -> None:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        os.rename(self.path, aside)
        self._reopen()

    def _reopen(self) -> None:
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _comes_again(said: Said, first: Row) -> bool:
    if said.step != first.step or first.is_training:
        return said.step >= first.step
    return not said.names.isdisjoint(first.values)
