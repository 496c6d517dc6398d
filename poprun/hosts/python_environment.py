"""This Python environment on disk, and the paths outside of it to which it refers."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poprun.errors import PopRunError
from poprun.hosts.survey_script import SOURCES

MARKER = "popdist-synchronised"
"""In a folder that poprun has made on another host; only in such a folder is anything removed."""

TOKEN_PREFIX = ".popdist-synchronise-"
"""Begins the name of an empty folder by which hosts that share a file system are recognised."""

LEFT_OUT = ("__pycache__",)
"""Every host compiles for itself: the times in these files differ, so they would be copied again and again."""

_OF_THE_SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))


@dataclass(frozen=True)
class Tree:
    """Folders that are copied together.

    Attributes:
        root: an absolute path, the same on every host.
        names: the folders below it; none: the root itself, with all that is in it.
    """

    root: Path
    names: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those that are copied, each with all that is in it."""
        return tuple(self.root / name for name in self.names) or (self.root,)


@dataclass(frozen=True)
class PythonEnvironment:
    """The folders with which a program finds the same Python packages on another host.

    Attributes:
        trees: copied.
        needed: paths outside of them that have to be there already, such as the interpreter that a venv refers to.
    """

    trees: tuple[Tree, ...]
    needed: tuple[Path, ...]

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those of all trees."""
        return tuple(folder for tree in self.trees for folder in tree.folders)


def this_environment() -> PythonEnvironment:
    """Return the environment that runs this process, and the project's packages if they are installed elsewhere.

    Raises:
        PopRunError: it belongs to the system.
    """
    project = Path(__file__).resolve().parents[2]
    return describe_environment(Path(sys.prefix), Path(sys.executable), project, Path(sysconfig.get_path("stdlib")))


def describe_environment(prefix: Path, python: Path, project: Path, library: Path) -> PythonEnvironment:
    """Tell apart what belongs to an environment and what it refers to.

    Raises:
        PopRunError: it belongs to the system.
    """
    if prefix in _OF_THE_SYSTEM:
        raise PopRunError(
            f"the Python environment is the system's own, {prefix}, and not copied; use a virtual environment "
            f"(`python -m venv`), or leave out --synchronise-python-venv"
        )
    packages = tuple(name for name in SOURCES if (project / name).is_dir())
    trees = [Tree(prefix)]
    if not project.resolve().is_relative_to(prefix.resolve()):
        trees.append(Tree(project, packages))
    needed = [_leave(python, prefix), None if library.is_relative_to(prefix) else library]
    return PythonEnvironment(tuple(trees), tuple(path for path in needed if path is not None))


def digest_tree(folder: Path) -> str:
    """Return a digest of the names, sizes, times and links in a folder, without files that are not copied."""
    digest = hashlib.sha256()
    for path, state in sorted(_walk(str(folder))):
        target = os.readlink(folder / path) if os.path.islink(folder / path) else ""
        digest.update(f"{path}\0{state}\0{target}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _leave(path: Path, prefix: Path) -> Path | None:
    """Return the first path outside of an environment to which a link in it leads; None if it does not leave it."""
    for _ in range(40):  # as many links as Linux follows
        if not path.is_relative_to(prefix):
            return path
        if not path.is_symlink():
            return None
        path = Path(os.path.normpath(path.parent / path.readlink()))
    return None


def _walk(folder: str, below: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in (MARKER, *LEFT_OUT) or entry.name.startswith(TOKEN_PREFIX):
                continue
            state, path = entry.stat(follow_symlinks=False), below + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield path, (state.st_mode,)
                yield from _walk(entry.path, f"{path}/")
            else:
                yield path, (state.st_mode, state.st_size, state.st_mtime_ns)
