"""Removes the files that jobs have left on this machine because what would have done it was killed.

Only files of the same user, of this host, and of processes that have ended, which no living process has open or mapped.
Open MPI makes a folder `ompi.PID` or `prted.PID` in the temporary folder, for mpirun or its daemon with that pid, and
`sm_segment.HOST.UID.JOB.RANK` in shared memory; `popdist-PID-*` is a window of ours that was about to be unlinked.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection

from poprun.ipc.processes import state_of

TYPE_CHECKING = False  # that of `typing`, which takes too long to load for the agent
if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED_MEMORY = "/dev/shm"
_SESSION = re.compile(r"(ompi|prted)\.(\d+)")
_MEETING = re.compile(r"pmix\.(?P<host>.+)\.tool\.(?P<pid>\d+)")
_DATA_OF_JOB = re.compile(r"pmix-gds-shmem\d*\.(?P<host>.+?)-prterun-.+\.(?P<pid>\d+)")
_SEGMENT = re.compile(r"sm_segment\.(?P<host>.+)\.(?P<user>\d+)\.[0-9a-f]+\.\d+")
_WINDOW = re.compile(r"popdist-(\d+)-[0-9a-f]{16}")


def remove_leavings(temporary: str, ended: Collection[int] = (), shared_memory: str = SHARED_MEMORY) -> list[str]:
    """Remove what is left of jobs that are over.

    Args:
        temporary: the folder in which Open MPI makes its own.
        ended: processes of Open MPI on this machine that are known to have ended.
        shared_memory: the folder of shared memory.

    Returns:
        What was removed.
    """
    sessions = [path for path in _own(temporary) if _is_dead_session(path, ended)]
    segments = [path for path in _own(shared_memory) if _may_be_left(os.path.basename(path))]
    if not sessions and not segments:
        return []
    found = [*sessions, *segments]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        # Whoever has made a file has it open, and then mapped, from its beginning on; so it is in one of the two.
        used = _used_by(pid)
        found = [path for path in found if not any(each == path or each.startswith(f"{path}/") for each in used)]
        if not found:
            return []
    return [path for path in found if _remove(path)]


def folder_of(environ: Mapping[str, str]) -> str:
    """Return the folder of Open MPI's own folders: the one that its daemon named, or mpirun's default."""
    own = environ.get("PMIX_SERVER_TMPDIR", "")
    if _SESSION.fullmatch(os.path.basename(own)):
        return os.path.dirname(own)
    return environ.get("TMPDIR") or "/tmp"


def _own(folder: str) -> list[str]:
    """Return the user's entries in a folder, without links."""
    try:
        with os.scandir(folder) as entries:
            return [
                os.path.realpath(each.path)
                for each in entries
                if not each.is_symlink() and each.stat(follow_symlinks=False).st_uid == os.geteuid()
            ]
    except OSError:
        return []


def _is_dead_session(path: str, ended: Collection[int]) -> bool:
    """Return whether the mpirun or daemon of a folder has ended, and cannot be another host's."""
    match = _SESSION.fullmatch(os.path.basename(path))
    if match is None or not os.path.isdir(path):
        return False
    pid = int(match[2])
    return pid in ended or (not _is_alive(pid) and any(_is_of_this_host(name, pid) for name in _files_of_session(path)))


def _files_of_session(path: str) -> list[str]:
    """Return the names in a session's folder and in those of its jobs, which go last."""
    return [name for folder in (path, *(f"{path}/{job}" for job in _names(path))) for name in _names(folder)]


def _is_of_this_host(name: str, pid: int) -> bool:
    """Return whether a file of a session says that the process ran here; a file server shares folders."""
    match = _MEETING.fullmatch(name) or _DATA_OF_JOB.fullmatch(name)
    return match is not None and int(match["pid"]) == pid and match["host"].partition(".")[0] == _short_name()


def _may_be_left(name: str) -> bool:
    if match := _SEGMENT.fullmatch(name):
        return match["user"] == str(os.geteuid()) and match["host"].partition(".")[0] == _short_name()
    return (match := _WINDOW.fullmatch(name)) is not None and not _is_alive(int(match[1]))


def _short_name() -> str:
    return os.uname().nodename.partition(".")[0]


def _is_alive(pid: int) -> bool:
    return state_of(pid) not in (b"X", b"Z")


def _used_by(pid: str) -> list[str]:
    """Return the files that a process has open or mapped, as far as we may see them."""
    used = []
    for name in _names(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it has closed it
            used.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        used += [f"/{line.rstrip().partition('/')[2]}" for line in file if "/" in line]
    return used


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _remove(path: str) -> bool:
    try:
        if os.path.isdir(path):
            import shutil  # seldom needed

            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        return False
    return not os.path.exists(path)
