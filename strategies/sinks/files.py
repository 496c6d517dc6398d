"""Metrics in files that a restarted job continues: comma-separated values and JSON lines."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, final

from typing_extensions import override

from popdist.records.private_files import open_unless_linked
from strategies.sinks.sink import STEP, TIME, PlainNumber, Row, Sink

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class LineHeader(NamedTuple):
    """The step and the names of the numbers in a line of a file.

    Attributes:
        step: Step of the line.
        names: Names of its numbers.
    """

    step: int
    names: frozenset[str]


ReadHeader = Callable[[bytes], LineHeader | None]
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
            self._check_file_start(start)
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

    def begin(self, first: Row, read_header: ReadHeader, heading: int = 0) -> bool:
        """Remove the lines that this job writes again, from the step of its first row on; later calls do nothing.

        If every line would be removed and another job wrote them, rename the file instead.

        Args:
            first: First row that is about to be written.
            read_header: Function that reads a line.
            heading: Number of heading lines.

        Returns:
            Whether the file may have changed.
        """
        if self._is_begun or not self.is_regular:
            return False
        self._is_begun = True
        position, is_all = self._place_of(first, read_header, heading)
        if is_all and not self._goes_on:
            self._set_aside()
        elif position < os.fstat(self._file).st_size:
            os.ftruncate(self._file, position)
        return True

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the content by these lines; if that fails, the old content stays and the error is raised."""
        temporary = self.path.with_name(f"{self.path.name}.new")
        temporary.unlink(missing_ok=True)
        try:
            with open(temporary, "wb", opener=_make) as file:
                file.writelines(lines)
                file.flush()
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._file).st_mode))
                os.replace(temporary, self.path)
                self._go_on_with(os.dup(file.fileno()))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def lines(self) -> Iterable[bytes]:
        """Yield the lines of the file, each with its newline."""
        with self.path.open("rb") as file:
            yield from file

    def close(self) -> None:
        """Close the file, which ends its lock."""
        os.close(self._file)

    def _check_file_start(self, start: bytes) -> None:
        begins = os.pread(self._file, len(start), 0).partition(b"\n")[0] if self.is_regular else b""
        if not start.startswith(begins):
            raise ValueError(f"the file exists and does not begin with {start.decode()}; name another file")

    def _place_of(self, first: Row, read_header: ReadHeader, heading: int) -> tuple[int, bool]:
        """Return the byte where the first row belongs, and whether all lines but headings lie behind it."""
        position, kept = 0, 0
        for number, line in enumerate(self.lines()):
            header = read_header(line) if number >= heading else None
            if not line.endswith(b"\n") or (header is not None and _comes_again(header, first)):
                return position, not kept and header is not None
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


def _comes_again(header: LineHeader, first: Row) -> bool:
    if header.step != first.step or first.is_training:
        return header.step >= first.step
    return not header.names.isdisjoint(first.values)


@final
class CsvFile(Sink):
    """A file with a heading and a line for each row: step, time, and one column per name, in order of appearance.

    A distribution has a column for its minimum, each quantile, its maximum, and each of its counts and shares.

    A name that appears later gets a new last column: the file is then written anew, and earlier lines are empty there.
    Numbers are written by `repr`, so that `float` reads the same number; NaN and infinities are nan, inf and -inf.
    """

    way_out = "make room there, or name another file"

    def __init__(self, path: Path) -> None:
        self.name = f"csv:{path}"
        self._path = path
        self._file: ContinuedFile | None = None
        self._columns: list[str] = []

    @override
    def open(self, goes_on: bool) -> None:
        """Open the file, and read its heading.

        Raises:
            ValueError: The file exists and is another table.
        """
        self._file = ContinuedFile(self._path, b"step,time", goes_on)
        self._columns = _columns_of(self._file)

    @override
    def write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        if self._file.begin(rows[0], self._header_of, heading=1):
            self._columns = _columns_of(self._file)
        known = set(self._columns)
        new = [name for name in dict.fromkeys(chain.from_iterable(row.all_values for row in rows)) if name not in known]
        if new or not self._columns:
            self._widen(self._file, new)
        self._file.append("".join(map(self._line_of, rows)).encode())

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _widen(self, file: ContinuedFile, new: Sequence[str]) -> None:
        """Add columns with these names."""
        columns = [*(self._columns or [STEP, TIME]), *new]
        heading = _joined(columns).encode()
        if self._columns and file.is_regular:
            file.replace(_widened(heading, iter(file.lines()), b"," * len(new)))
        else:
            file.append(heading)
        self._columns = columns

    def _line_of(self, row: Row) -> str:
        values = row.all_values
        return _joined([row.step, row.time_s, *(values.get(name, "") for name in self._columns[2:])])

    def _header_of(self, line: bytes) -> LineHeader | None:
        try:
            step, _, *numbers = next(csv.reader([line.decode()]))
            return LineHeader(
                int(step), frozenset(name for name, number in zip(self._columns[2:], numbers, strict=False) if number)
            )
        except (ValueError, StopIteration, csv.Error):
            return None


def _columns_of(file: ContinuedFile) -> list[str]:
    heading = next(iter(file.lines()), b"") if file.is_regular else b""
    return next(csv.reader([heading.decode(errors="replace")]), []) if heading.endswith(b"\n") else []


def _widened(heading: bytes, lines: Iterator[bytes], more: bytes) -> Iterator[bytes]:
    next(lines, None)
    yield heading
    for line in lines:
        yield line.removesuffix(b"\n") + more + b"\n"


def _joined(fields: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue()


@final
class JsonLines(Sink):
    """A file with one JSON object per line: "step", "time", and the numbers by their names.

    JSON has no NaN and no infinity: they are the strings "NaN", "Infinity" and "-Infinity", which `float` reads. All
    other numbers have enough digits for `float` to read the same number. A distribution is an object with its numbers,
    the edges of its bins, and their counts.
    """

    way_out = "make room there, or name another file"

    def __init__(self, path: Path) -> None:
        self.name = f"jsonl:{path}"
        self._path = path
        self._file: ContinuedFile | None = None

    @override
    def open(self, goes_on: bool) -> None:
        """Open the file.

        Raises:
            ValueError: The file exists and has other content.
        """
        self._file = ContinuedFile(self._path, b'{"step": ', goes_on)

    @override
    def write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        self._file.begin(rows[0], _header_of)
        self._file.append("".join(map(line_of, rows)).encode())

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def line_of(row: Row) -> str:
    """Return a row as a line of JSON."""
    header: dict[str, object] = {STEP: row.step, TIME: row.time_s, **_plain_numbers(row.values)}
    for name, distribution in row.distributions.items():
        edges = [_plain(edge) for edge in distribution.edges.tolist()]
        counts = distribution.counts.tolist()
        header[name] = {**_plain_numbers(distribution.numbers), "edges": edges, "counts": counts}
    return json.dumps(header, allow_nan=False) + "\n"


def _plain_numbers(values: Mapping[str, PlainNumber]) -> dict[str, PlainNumber | str]:
    return {name: _plain(number) for name, number in values.items()}


def _plain(number: PlainNumber) -> PlainNumber | str:
    if isinstance(number, int) or math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _header_of(line: bytes) -> LineHeader | None:
    try:
        found = json.loads(line)
        return LineHeader(int(found[STEP]), frozenset(found) - {STEP, TIME})
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
