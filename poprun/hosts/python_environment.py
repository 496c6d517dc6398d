"""The Python environment of this process on disk, and the outside paths that it refers to."""

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
"""A file in folders that poprun has made on other hosts; only in these folders poprun removes files."""

TOKEN_PREFIX = ".popdist-synchronise-"
"""The beginning of the name of an empty folder that reveals which hosts share a file system."""

LEFT_OUT = ("__pycache__",)
"""Folders that are not copied: every host compiles for itself, and differing times would cause copies every time."""

_OF_THE_SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))


@dataclass(frozen=True)
class Tree:
    """A set of folders that are copied together.

    Attributes:
        root: An absolute path, the same on every host.
        names: The folders below the root. Empty: the root itself with all its content.
    """

    root: Path
    names: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders to copy, each with all its content."""
        return tuple(self.root / name for name in self.names) or (self.root,)


@dataclass(frozen=True)
class PythonEnvironment:
    """The folders in which a program on another host finds the same Python packages.

    Attributes:
        trees: The folders to copy.
        needed: Paths outside of the trees that have to exist on the host, such as a venv's base interpreter.
    """

    trees: tuple[Tree, ...]
    needed: tuple[Path, ...]

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders of all trees."""
        return tuple(folder for tree in self.trees for folder in tree.folders)


def this_environment() -> PythonEnvironment:
    """Return the environment of this process, and the project's packages if they are installed elsewhere.

    Raises:
        PopRunError: The environment is the system's own.
    """
    project = Path(__file__).resolve().parents[2]
    return describe_environment(Path(sys.prefix), Path(sys.executable), project, Path(sysconfig.get_path("stdlib")))


def describe_environment(prefix: Path, python: Path, project: Path, library: Path) -> PythonEnvironment:
    """Describe an environment: the folders that belong to it, and the paths that it refers to.

    Raises:
        PopRunError: The environment is the system's own.
    """
    if prefix in _OF_THE_SYSTEM:
        raise PopRunError(
            f"the Python environment is the system's own ({prefix}) and is not copied; use a virtual environment "
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
    """Return the first path outside of the environment that a link in it leads to; None if the path stays inside."""
    for _ in range(40):  # Linux follows at most 40 links
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
