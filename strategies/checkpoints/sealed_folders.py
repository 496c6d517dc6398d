"""Folders that are written completely or not at all, with a digest of each file.

A writer fills a folder under another name, seals it, and renames it. Later changes of a file are detected.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePath

from popdist.records.private_files import close_to_others

TRAINING, SUMS = "training.json", "SHA256SUMS"
INCOMPLETE, DAMAGED, REMOVED, REPLACED = ".incomplete", ".damaged", ".removed", ".replaced"


def seal(folder: Path) -> None:
    """Write the digests of all files of a folder into it, and flush the folder to disk.

    One of the files must be `TRAINING`: its name sorts last, so `fault_of` sees whether the list of digests is
    complete.
    """
    sums = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in _files(folder)]
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(parent, name) for name in names), Path(parent)):
            close_to_others(path)
            _sync(path)


def put(incomplete: Path, complete: Path) -> None:
    """Give a sealed folder its final name; until then, an older folder keeps that name."""
    replaced = beside(complete, REPLACED)
    if complete.exists():
        complete.rename(replaced)
    try:
        incomplete.rename(complete)
    except OSError:
        if replaced.exists():
            replaced.rename(complete)
        raise
    _sync(complete.parent)
    clear(replaced)


def fault_of(checkpoint: Path) -> str:
    """Return the fault in the files of a checkpoint, in words; empty without a fault."""
    try:
        lines = content(checkpoint / SUMS).decode().splitlines()
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read: {_said(error)}"
    wanted = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    if TRAINING not in wanted:
        return f"{SUMS} is cut off"
    for name, sha256 in wanted.items():
        if not _is_inside(checkpoint, name):
            return f"{SUMS} names {ascii(name[:100])}, which is not a file of the checkpoint"
        try:
            if _sha256(checkpoint / name) != sha256:
                return f"{name} has changed since it was written"
        except (OSError, ValueError) as error:
            return f"{shown(name)} cannot be read: {_said(error)}"
    others = [path for path in checkpoint.rglob("*") if not (path.is_file() or path.is_dir())]
    return f"{others[0].relative_to(checkpoint)} is neither a file nor a folder" if others else ""


def shown(name: str) -> str:
    """Return a name read from a file, in a form that is safe in a message."""
    return name if name.isprintable() else repr(name)


def _is_inside(checkpoint: Path, name: str) -> bool:
    """Return whether a name stays inside a checkpoint and names no device or pipe; the file may be missing."""
    within = PurePath(name)
    if within.is_absolute() or ".." in within.parts or "\0" in name:
        return False
    path = os.path.join(os.path.realpath(checkpoint), within)
    return os.path.realpath(path) == path and (os.path.isfile(path) or not os.path.exists(path))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _open(path: Path) -> BufferedReader:
    """Open a regular file for reading; refuse others, such as a named pipe, which would wait for its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def content(path: Path) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: If it cannot be read, or is not a regular file, such as a pipe.
    """
    with _open(path) as file:
        return file.read()


def _sha256(path: Path) -> str:
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clear(path: Path) -> None:
    """Remove a folder with its content, or a file; leave what cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def beside(path: Path, suffix: str) -> Path:
    """Return the path of the same name with a suffix."""
    return path.with_name(path.name + suffix)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _said(error: Exception) -> str:
    """Return the reason of an error without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
