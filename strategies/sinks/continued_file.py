"""A file of lines that a restarted job continues: the lines of steps that are made again are replaced."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, final

from popdist.records.private_files import open_unless_linked
from strategies.sinks.sink import Row

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class Said(NamedTuple):
    """The step of a line, and the names of its numbers.

    Attributes:
        step: Step of the line.
        names: Names of its numbers.
    """

    step: int
    names: frozenset[str]


SaidBy = Callable[[bytes], Said | None]
"""A function that returns the step and names of a line of a file, or None if it cannot read the line."""


@final
class ContinuedFile:
    """A file to append lines to, unbuffered. While it is open, no other `ContinuedFile` can open it.

    Args:
        path: Path of the file; its folder is made.
        start: First bytes of every file of this kind.
        goes_on: Whether this job began the file.

    Raises:
        ValueError: The existing file begins with other bytes.
        BlockingIOError: Another `ContinuedFile`, of this process or another one, has the file open.
        PermissionError: The path is a symbolic link of another user.
    """

    def __init__(self, path: Path, start: bytes, goes_on: bool) -> None:
        self.path = path
        self._goes_on = goes_on
        self._is_begun = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(path)
        try:
            self._refuse_others(start)
        except BaseException:
            self.close()
            raise

    @property
    def is_regular(self) -> bool:
        """Whether the file can be read and truncated; a pipe or a terminal cannot."""
        return _is_regular(self._file)

    def append(self, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            OSError: Writing failed; a part may be in the file.
        """
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def begin(self, first: Row, said_by: SaidBy, heading: int = 0) -> bool:
        """Remove the lines that this job writes again, from the step of its first row on; later calls do nothing.

        If every line would be removed and another job wrote them, rename the file instead.

        Args:
            first: First row that is about to be written.
            said_by: Function that reads a line.
            heading: Number of heading lines.

        Returns:
            Whether the file may have changed.
        """
        if self._is_begun or not self.is_regular:
            return False
        self._is_begun = True
        position, is_all = self._place_of(first, said_by, heading)
        if is_all and not self._goes_on:
            self._set_aside()
        elif position < os.fstat(self._file).st_size:
            os.ftruncate(self._file, position)
        return True

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the content by these lines; if that fails, the old content stays and the error is raised."""
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.unlink(missing_ok=True)
        try:
            with open(beside, "wb", opener=_make) as file:
                file.writelines(lines)
                file.flush()
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._file).st_mode))
                os.replace(beside, self.path)
                self._go_on_with(os.dup(file.fileno()))
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def lines(self) -> Iterable[bytes]:
        """Yield the lines of the file, each with its newline."""
        with self.path.open("rb") as file:
            yield from file

    def close(self) -> None:
        """Close the file, which ends its lock."""
        os.close(self._file)

    def _refuse_others(self, start: bytes) -> None:
        begins = os.pread(self._file, len(start), 0).partition(b"\n")[0] if self.is_regular else b""
        if not start.startswith(begins):
            raise ValueError(f"the file exists and does not begin with {start.decode()}; name another file")

    def _place_of(self, first: Row, said_by: SaidBy, heading: int) -> tuple[int, bool]:
        """Return the byte where the first row belongs, and whether all lines but headings lie behind it."""
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
        self._go_on_with(_make(self.path))

    def _go_on_with(self, descriptor: int) -> None:
        os.close(self._file)
        self._file = descriptor


def _open_locked(path: Path) -> int:
    """Open a file that no other descriptor has locked, and lock it; make the file if it is missing."""
    while True:
        descriptor = open_unless_linked(path, _FLAGS)
        try:
            _lock(descriptor)
            if not _is_regular(descriptor) or os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the process that held the lock has replaced the file meanwhile


def _make(path: Path | str, flags: int = 0) -> int:
    """Make a file that does not exist yet, and lock it."""
    descriptor = os.open(path, _FLAGS | os.O_EXCL, 0o666)
    _lock(descriptor)
    return descriptor


def _lock(descriptor: int) -> None:
    """Lock a regular file by flock. Unlike a POSIX lock, it survives the closing of another descriptor of the file.

    Raises:
        BlockingIOError: The file is locked.
    """
    if not _is_regular(descriptor):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(errno.EWOULDBLOCK, "another job, or another sink of this job, writes to it") from None
    except OSError:  # some file systems have no locks
        return


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _comes_again(said: Said, first: Row) -> bool:
    if said.step != first.step or first.is_training:
        return said.step >= first.step
    return not said.names.isdisjoint(first.values)
