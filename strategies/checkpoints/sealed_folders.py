"""Folders that are written completely or not at all, and arrays and plain values in the form stored there.

The writer of a folder fills it under another name, seals it, and renames it. Later changes of a file are detected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any, final

import numpy as np

from popdist.records.private_files import close_to_others
from strategies.typing import Leaf


@dataclass(frozen=True)
class Packing:
    """The layout of named arrays in one flat array per dtype.

    Attributes:
        arrays: Name, dtype and shape of each array.
    """

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Leaf]) -> Packing:
        """Return the packing of these arrays."""
        return cls(tuple((name, str(array.dtype), tuple(array.shape)) for name, array in arrays.items()))

    @classmethod
    def from_lists(cls, lists: list[Any]) -> Packing:
        """Return the packing that JSON stored as lists; raise ValueError for other lists."""
        try:
            return cls(tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in lists))
        except TypeError as error:
            raise ValueError(f"{lists!r} is not a list of names, dtypes and shapes") from error

    @property
    def layouts(self) -> dict[str, str]:
        """The dtype and shape of each array, such as `float32[3, 2]`."""
        return {name: f"{dtype}{list(shape)}" for name, dtype, shape in self.arrays}

    def allocate(self) -> dict[str, np.ndarray]:
        """Return an uninitialised flat array for each dtype."""
        sizes: dict[str, int] = {}
        for _, dtype, shape in self.arrays:
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
        return {dtype: np.empty(size, dtype) for dtype, size in sizes.items()}

    def views(self, flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the named arrays as views of flat arrays like those of `allocate`."""
        ends: dict[str, int] = {}
        found = {}
        for name, dtype, shape in self.arrays:
            begin = ends.get(dtype, 0)
            ends[dtype] = begin + math.prod(shape)
            found[name] = flat[dtype][begin : ends[dtype]].reshape(shape)
        return found


def plain_values(extra: Any) -> dict[str, Any]:
    """Return a copy of the program's own values as JSON restores them: tuples become lists.

    Args:
        extra: Mapping of strings to numbers, strings, True, False, None, and lists and mappings of these. A number may
            be a scalar of NumPy or JAX.

    Raises:
        TypeError: If `extra` is not such a mapping.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; it must be a dictionary with strings as keys")
    plain = {}
    for name, value in extra.items():
        try:
            plain[name] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"extra[{name!r}] cannot be saved ({error}); use numbers, strings, lists and dictionaries, and keep "
                "arrays in the state"
            ) from error
    return plain


def plain_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as Python numbers.

    Args:
        metrics: Mapping of strings to numbers, or to scalars of NumPy or JAX, like the metrics of a step.

    Raises:
        TypeError: If `metrics` is not such a mapping.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"metrics is {metrics!r}; it must be a dictionary of numbers, like the metrics of a step"
        ) from error


def _plain(value: Leaf) -> object:
    """Return a value that JSON can write: a number for a scalar array, a dictionary for a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"it is of type {type(value).__name__}")


class Age:
    """The age of some memory: the number of times its content was replaced.

    Attributes:
        number: Number of replacements.
    """

    def __init__(self) -> None:
        self.number = 0


@final
class HostArray(np.ndarray):
    """A view of memory that the next step overwrites; then it is used up, like a donated array of JAX.

    Checkpoints pass such arrays on unchanged, because arrays of JAX would lose 64-bit numbers.
    """

    _age: Age | None = None
    _born = 0

    @classmethod
    def of(cls, array: np.ndarray, age: Age) -> HostArray:
        """Return a view of the array, valid until its memory is replaced."""
        view = array.view(cls)
        view._age, view._born = age, age.number
        return view

    def is_deleted(self) -> bool:
        """Return whether a step has used the view up."""
        return self._age is not None and self._age.number != self._born


# ---- folders

TRAINING, SUMS = "training.json", "SHA256SUMS"
INCOMPLETE, DAMAGED, REMOVED, REPLACED = ".incomplete", ".damaged", ".removed", ".replaced"


def seal(folder: Path) -> None:
    """Write the digests of all files of a folder into it, and flush the folder to disk.

    One of the files must be `TRAINING`: its name sorts last, so `fault_of` sees whether the list of digests is
    complete.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in files]
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(parent, name) for name in names), Path(parent)):
            close_to_others(path)
            _sync(path)


def put(incomplete: Path, complete: Path) -> None:
    """Give a sealed folder its final name; until then, an older folder keeps that name."""
    replaced = sibling(complete, REPLACED)
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


def sibling(path: Path, suffix: str) -> Path:
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
