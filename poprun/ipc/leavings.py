"""The removal of files that killed jobs have left on this machine.

Only files of the same user and host are removed, if their processes have ended and no living process has them open or
mapped. Open MPI makes a folder `ompi.PID` or `prted.PID` in the temporary folder, for mpirun or its daemon with that
pid, and `sm_segment.HOST.UID.JOB.RANK` in shared memory. `popdist-PID-*` is a window of popdist before its unlinking.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection

from poprun.ipc.processes import state_of

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load for the agent
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SHARED_MEMORY = "/dev/shm"
_SESSION = re.compile(r"(ompi|prted)\.(\d+)")
_MEETING = re.compile(r"pmix\.(?P<host>.+)\.tool\.(?P<pid>\d+)")
_DATA_OF_JOB = re.compile(r"pmix-gds-shmem\d*\.(?P<host>.+?)-prterun-.+\.(?P<pid>\d+)")
_SEGMENT = re.compile(r"sm_segment\.(?P<host>.+)\.(?P<user>\d+)\.[0-9a-f]+\.\d+")
_WINDOW = re.compile(r"popdist-(\d+)-[0-9a-f]{16}")


def remove_leavings(temporary: str, ended: Collection[int] = (), shared_memory: str = SHARED_MEMORY) -> list[str]:
    """Remove the files of ended jobs.

    Args:
        temporary: The folder in which Open MPI makes its folders.
        ended: Processes of Open MPI on this machine that are known to have ended.
        shared_memory: The folder of shared memory.

    Returns:
        The paths of the removed files and folders.
    """
    sessions = [path for path in _own(temporary, _SESSION.fullmatch) if _is_dead_session(path, ended)]
    segments = _own(shared_memory, _may_be_left)
    if not sessions and not segments:
        return []
    found = [*sessions, *segments]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        # A process has its file open or mapped from the creation on. The files were listed before the processes are,
        # so a file that is in use is found here.
        used = _used_by(pid, found)
        found = [path for path in found if not any(each == path or each.startswith(f"{path}/") for each in used)]
        if not found:
            return []
    return [path for path in found if _remove(path)]


def folder_of(environ: Mapping[str, str]) -> str:
    """Return the folder in which Open MPI makes its folders: the one named by its daemon, or mpirun's default."""
    own = environ.get("PMIX_SERVER_TMPDIR", "")
    if _SESSION.fullmatch(os.path.basename(own)):
        return os.path.dirname(own)
    return environ.get("TMPDIR") or "/tmp"


def _own(folder: str, is_named_so: Callable[[str], object]) -> list[str]:
    """Return the user's entries in a folder that have such names, without symbolic links."""
    try:
        with os.scandir(folder) as entries:
            return [
                os.path.realpath(each.path)
                for each in entries
                if is_named_so(each.name)  # first, because a temporary folder may have thousands of entries
                and not each.is_symlink()
                and each.stat(follow_symlinks=False).st_uid == os.geteuid()
            ]
    except OSError:
        return []


def _is_dead_session(path: str, ended: Collection[int]) -> bool:
    """Return whether a folder belongs to an ended mpirun or daemon of this host."""
    pid = int(path.rpartition(".")[2])
    if not os.path.isdir(path):
        return False
    return pid in ended or (not _is_alive(pid) and any(_is_of_this_host(name, pid) for name in _files_of_session(path)))


def _files_of_session(path: str) -> list[str]:
    """Return the names in a session's folder, then the names in its jobs' folders, which are removed last."""
    return [name for folder in (path, *(f"{path}/{job}" for job in _names(path))) for name in _names(folder)]


def _is_of_this_host(name: str, pid: int) -> bool:
    """Return whether a session's file shows that the process ran on this host; hosts may share the folder."""
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


def _used_by(pid: str, paths: list[str]) -> list[str]:
    """Return the files that a process has open, and if one of the paths may be mapped, all that it has mapped.

    Files that this process may not see are left out.
    """
    used = []
    for name in _names(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            used.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        maps = file.read()  # a large program has thousands of lines, so they are split only if necessary
        if any(path in maps for path in paths):
            used += [f"/{line.partition('/')[2]}" for line in maps.splitlines() if "/" in line]
    return used


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _remove(path: str) -> bool:
    try:
        if os.path.isdir(path):
            import shutil  # takes some milliseconds to load, and most agents remove nothing

            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        return False
    return not os.path.exists(path)
