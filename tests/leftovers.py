"""Search for processes, shared memory and temporary files that tests leave behind."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "TESTED_BY"
"""A variable that all descendants of a worker of pytest inherit, unless they get another environment."""
SHARED_MEMORY = Path("/dev/shm")
GUARD_S = 30.0
"""Time for processes to end and to remove their files on a busy machine."""
LOOK_S = 0.01
OF_PYTHON = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Python's own helper processes, which end with the process that started them."""


@dataclass(frozen=True)
class Present:
    """The processes and files at one moment.

    Attributes:
        processes: The numbers of all processes.
        shared: The names in shared memory.
        files: The names in the temporary folder.
    """

    processes: frozenset[str]
    shared: frozenset[str]
    files: frozenset[str]


class Lookout:
    """A search for leftovers of this process's tests.

    Marks this process, so that its descendants inherit the mark, and gives it a separate temporary folder.

    Attributes:
        folder: The temporary folder of this process and its descendants.
    """

    def __init__(self) -> None:
        self._mark = f"{MARK}={os.getpid()}-{secrets.token_hex(8)}".encode()
        os.environ[MARK] = self._mark.decode().partition("=")[2]
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # the folder of pytest's own folders
        self.folder = Path(tempfile.mkdtemp(prefix="tests-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)

    def present(self) -> Present:
        """Return the present processes and files."""
        return Present(_names(Path("/proc"), str.isdigit), _names(SHARED_MEMORY), _names(self.folder))

    def left_since(self, before: Present) -> list[str]:
        """Return new processes and files that do not disappear by themselves."""
        give_up_s = time.monotonic() + GUARD_S
        while left := self._new_since(before):
            if time.monotonic() > give_up_s:
                return left
            time.sleep(LOOK_S)
        return []

    def _new_since(self, before: Present) -> list[str]:
        now = self.present()
        processes = [self._describe(pid) for pid in now.processes - before.processes]
        shared = _unused(now.shared - before.shared)
        return [
            *filter(None, processes),
            *(f"{SHARED_MEMORY}/{name}, which no process uses (of this test, or of one beside it)" for name in shared),
            *(f"{self.folder}/{name}" for name in now.files - before.files if _holds_a_file(self.folder / name)),
        ]

    def _describe(self, pid: str) -> str:
        """Describe a living process with our mark; return "" for all others."""
        try:
            if pid == str(os.getpid()) or self._mark not in Path("/proc", pid, "environ").read_bytes().split(b"\0"):
                return ""
            words = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:  # the process has ended
            return ""
        if not words or any(name in words for name in OF_PYTHON):
            return ""
        return f"process {pid}: {words.replace(bytes(1), b' ').decode(errors='replace')}"

    def close(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _names(folder: Path, condition: Callable[[str], bool] = bool) -> frozenset[str]:
    try:
        return frozenset(filter(condition, os.listdir(folder)))
    except FileNotFoundError:
        return frozenset()


def _holds_a_file(path: Path) -> bool:
    """Return whether a path is or contains a file: Open MPI leaves empty folders without a launcher."""
    return not path.is_dir() or any(not each.is_dir() for each in path.rglob("*"))


def _unused(names: Iterable[str]) -> list[str]:
    """Return the files of shared memory that no process has open or mapped."""
    left = set(names)
    for process in Path("/proc").glob("[0-9]*") if left else ():
        used = _files_used_by(process)
        left = {name for name in left if f"{SHARED_MEMORY}/{name}" not in used}
    return sorted(left)


def _files_used_by(process: Path) -> str:
    used = []
    with suppress(OSError):
        used.append((process / "maps").read_text(errors="replace"))
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # such as the link to the folder itself
                used.append(os.readlink(link))
    return "\n".join(used)
