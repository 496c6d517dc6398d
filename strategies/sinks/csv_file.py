"""Metrics as a table of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import final

from typing_extensions import override

from strategies.sinks.continued_file import ContinuedFile, Said
from strategies.sinks.sink import STEP, TIME, Row, Sink


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
        if self._file.begin(rows[0], self._said, heading=1):
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

    def _said(self, line: bytes) -> Said | None:
        try:
            step, _, *numbers = next(csv.reader([line.decode()]))
            return Said(
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
