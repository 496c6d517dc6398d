"""The files with the output of a job: one for each instance and stream, and one with all output merged."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from popdist.records.private_files import open_unless_linked
from poprun.errors import UsageError
from poprun.output.output_style import STREAMS, Cursor

MERGED = "merged.log"
MOST_OPEN = 64


class OutputFiles:
    """A folder with `instance-000.stdout`, `instance-000.stderr` and so on, and `merged.log`.

    No method raises, and none waits, except for a disk. If a file cannot be written, for example on a full disk, a
    warning says so, and no more output is kept: every file is a gapless beginning of the output.

    Args:
        directory: The folder, which is made together with its parents.
        count: The number of instances.
        warn: Function that is called with a warning, at most once.

    Raises:
        UsageError: The folder cannot be made or written, or holds the output of an earlier job.
    """

    def __init__(self, directory: Path, count: int, warn: Callable[[str], None]) -> None:
        self._directory = directory
        self._count = count
        self._warn = warn
        self._cursor = Cursor()
        self._open: dict[str, int] = {}
        self._has_failed = False
        _make(directory, [name_of(each, stream, count) for each in range(count) for stream in STREAMS] + [MERGED])

    def record(self, instance: int, descriptor: int, data: bytes) -> None:
        """Keep an instance's output, byte for byte."""
        self._append(name_of(instance, descriptor, self._count), data)

    def merge(self, tag: bytes, data: bytes, clock: bytes) -> None:
        """Keep lines, or a piece of a line, in the form in which they are shown."""
        self._append(MERGED, self._cursor.tagged(tag, data, clock))

    def merge_own(self, data: bytes) -> None:
        """Keep lines of poprun or mpirun."""
        self._append(MERGED, self._cursor.end_line() + data)

    def close(self) -> None:
        """End the last line, and close the files."""
        if line_end := self._cursor.end_line():
            self._append(MERGED, line_end)
        while self._open:
            name, descriptor = self._open.popitem()
            self._guarded(name, partial(os.close, descriptor))

    def _append(self, name: str, data: bytes) -> None:
        self._guarded(name, lambda: _write_all(self._descriptor(name), data))

    def _guarded(self, name: str, do: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            do()
        except OSError as error:
            self._has_failed = True
            self._warn(
                f"cannot write {self._directory / name}: {error.strerror}; "
                f"the job goes on, but no more of its output is kept in {self._directory}"
            )

    def _descriptor(self, name: str) -> int:
        """Return an open descriptor of the file; only the most recently written files stay open."""
        descriptor = self._open.pop(name, -1)
        if descriptor < 0:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = open_unless_linked(self._directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._open[name] = descriptor
        return descriptor


def name_of(instance: int, descriptor: int, count: int) -> str:
    """Return the file name for an instance's stream; the names sort like the instances."""
    digits = max(3, len(str(count - 1)))
    return f"instance-{instance:0{digits}d}.{STREAMS[descriptor]}"


def _make(directory: Path, names: list[str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        earlier = sorted(path.name for path in directory.iterdir() if _is_output(path.name))
        if earlier:
            raise UsageError(
                f"--output-dir {directory} holds the output of an earlier job ({earlier[0]}), and poprun "
                "overwrites nothing; name another folder, or remove that output"
            )
        for name in names:
            os.close(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        raise UsageError(
            f"--output-dir {directory} cannot be used: {error.filename}: {error.strerror}; "
            "name a folder that you may make and write"
        ) from error


def _is_output(name: str) -> bool:
    return name == MERGED or (name.startswith("instance-") and name.endswith(tuple(STREAMS.values())))


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
