"""Opening the file of an instance, so that no other job that records into the same folder writes to it too."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from popdist.records.linked_files import open_unless_linked


def open_recording(path: Path) -> BinaryIO:
    """The file, empty, without a buffer, and this process's own until it ends or closes it.

    Args:
        path: of the file. Where another process writes to that, its name gets the number of this one.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _open(path)
    if not _lock(file):
        file.close()
        file = _open(path.with_name(f"{path.stem}.process-{os.getpid()}{path.suffix}"))
        _lock(file)
    if file.seek(0, os.SEEK_END):
        file.truncate(0)
    return file


def is_being_written(path: Path) -> bool:
    """Whether another process, where file systems tell, has opened it by `open_recording`, and lives.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open("ab", buffering=0) as file:
        return not _lock(file)


def _open(path: Path) -> BinaryIO:
    return open(path, "ab", buffering=0, opener=open_unless_linked)


def _lock(file: BinaryIO) -> bool:
    """Lock it: by POSIX, which network file systems know, and which processes that are forked do not inherit."""
    with suppress(OSError):  # some file systems have no locks
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
