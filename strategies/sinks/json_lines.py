"""Metrics as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from typing_extensions import override

from strategies.sinks.continued_file import ContinuedFile, Said
from strategies.sinks.distribution import Distribution
from strategies.sinks.sink import STEP, TIME, PlainNumber, Row, Sink


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
        self._file.begin(rows[0], _said)
        self._file.append("".join(map(line_of, rows)).encode())

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def line_of(row: Row) -> str:
    """Return a row as a line of JSON."""
    of_all = {name: _object_of(each) for name, each in row.distributions.items()}
    said = {STEP: row.step, TIME: row.time_s, **_plain_numbers(row.values), **of_all}
    return json.dumps(said, allow_nan=False) + "\n"


def _object_of(distribution: Distribution) -> dict[str, object]:
    edges = [_plain(edge) for edge in distribution.edges.tolist()]
    return {**_plain_numbers(distribution.numbers), "edges": edges, "counts": distribution.counts.tolist()}


def _plain_numbers(values: Mapping[str, PlainNumber]) -> dict[str, PlainNumber | str]:
    return {name: _plain(number) for name, number in values.items()}


def _plain(number: PlainNumber) -> PlainNumber | str:
    if isinstance(number, int) or math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _said(line: bytes) -> Said | None:
    try:
        found = json.loads(line)
        return Said(int(found[STEP]), frozenset(found) - {STEP, TIME})
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
