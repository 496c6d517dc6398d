"""A sink for tests that keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.sinks.sink import PlainNumber, Row, Sink


class KeptRows(Sink):
    """A sink that keeps its rows.

    Attributes:
        rows: All rows, in order.
        values: The numbers of each row by their names, as the sink's thread read them.
    """

    name = "kept:here"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.values: list[dict[str, PlainNumber]] = []

    def open(self, goes_on: bool) -> None:
        """Do nothing."""

    def write(self, rows: Sequence[Row]) -> None:
        self.values += [dict(row.values) for row in rows]
        self.rows += rows

    def close(self) -> None:
        """Do nothing."""
