"""The file of a trace, event by event."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from popdist.records.private_files import open_unless_linked

_CHUNK = 20_000
_COMPRESSED = ".gz"


class Writer:
    """Events of a trace, with commas between them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_first = True
        self.counters = 0

    def text(self, text: str) -> None:
        """Events that end with a comma and a new line each."""
        if text:
            self._file.write((text[:-2] if self._is_first else f",\n{text[:-2]}").encode())
            self._is_first = False

    def lines(self, events: Iterator[Mapping[str, Any]]) -> None:
        """A few events."""
        self.text("".join(f"{json.dumps(event)},\n" for event in events))

    def table(self, form: str, columns: Sequence[Sequence[Any] | np.ndarray]) -> None:
        """Many events: a text with as many `%` as there are columns, once for each row."""
        count = len(columns[0])
        for start in range(0, count, _CHUNK):
            parts = [each[start : start + _CHUNK] for each in columns]
            size = len(parts[0])
            flat: list[Any] = [None] * (size * len(parts))
            for place, part in enumerate(parts):
                flat[place :: len(parts)] = part.tolist() if isinstance(part, np.ndarray) else part
            self.text((form * size) % tuple(flat))


def opened(path: Path) -> BinaryIO:
    """The file of a trace, empty; compressed where the name ends in .gz."""
    if path.suffix == _COMPRESSED:
        os.close(open_unless_linked(path, os.O_WRONLY | os.O_CREAT))
        return cast(BinaryIO, gzip.open(path, "wb", compresslevel=1))
    return open(path, "wb", buffering=1 << 20, opener=open_unless_linked)


def name_of(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """The event that names a process or a thread."""
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def us_of(times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole us, and the ns that are left."""
    return times_ns // 1000, times_ns % 1000
