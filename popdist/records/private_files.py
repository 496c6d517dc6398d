"""Files and folders of one user: refused where others can write, where they are links, or where another job writes."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; those that are there stay as they are.

    Raises:
        OSError: if that is impossible.
    """
    missing = [path for path in folder.parents if not path.exists()]
    for each in (*reversed(missing), folder):
        each.mkdir(mode=0o700, exist_ok=True)


def close_to_others(path: Path) -> None:
    """Take from a file or folder all rights of others; this user's own stay as they are.

    Raises:
        OSError: if that is impossible.
    """
    path.chmod(path.stat().st_mode & stat.S_IRWXU)


def fault_of(folder: Path) -> str:
    """Return who else can change what lies in a folder, and what to do; empty where only this user and root can.

    The rules are those of OpenSSH for keys: the folder and all above it belong to this user or to root, and nobody else
    can write to them. Above it, a sticky bit will do, as that of /tmp, and so will a group that is this user's own.

    Args:
        folder: an absolute path without symbolic links.

    Raises:
        OSError: if it cannot be looked at.
    """
    for path in (folder, *folder.parents):
        status = path.stat()
        if fault := _fault_of_owner(path, status):
            return fault
        if status.st_mode & _OTHERS_WRITE and (path == folder or not _is_safe_above(status)):
            return f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w {path}"
    return ""


def fault_of_entries(folder: Path) -> str:
    """Return the same of the entries of a folder, which may be older than its present rights.

    Raises:
        OSError: if it cannot be looked at.
    """
    is_closed = not folder.stat().st_mode & _OTHERS_ENTER
    for path in folder.iterdir():
        status = path.lstat()
        if fault := _fault_of_owner(path, status):
            return fault
        if status.st_mode & _OTHERS_WRITE and not (is_closed or stat.S_ISLNK(status.st_mode)):
            return f"others can write to {path}; chmod -R go-w {folder}"
    return ""


def _fault_of_owner(path: Path, status: os.stat_result) -> str:
    user = os.geteuid()
    if status.st_uid in (0, user):
        return ""
    return f"{path} belongs to user {status.st_uid}, and this is user {user}; name a folder of your own"


def _is_safe_above(status: os.stat_result) -> bool:
    """Return whether others who can write to a folder can still not replace what this user has in it."""
    if status.st_mode & stat.S_ISVTX:
        return True
    return not status.st_mode & stat.S_IWOTH and _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Return whether nobody but this user is in a group: distributions make one for each user."""
    user = os.geteuid()
    try:
        names = {pwd.getpwuid(user).pw_name}
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        return False
    return members <= names and {each.pw_uid for each in pwd.getpwall() if each.pw_gid == group} == {user}


def fault_of_file(descriptor: int) -> str:
    """Return who else can change an open file, and what to do about it; empty where only this user and root can.

    A file belongs to one of them, and nobody else can write to it but a group that is this user's own. Pipes and
    terminals only have to belong to them.

    Raises:
        OSError: if it cannot be looked at.
    """
    status, user = os.fstat(descriptor), os.geteuid()
    if status.st_uid not in (0, user):
        return f"it belongs to user {status.st_uid}, and this is user {user}; read it, and if it is good, copy it"
    others_write = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    if stat.S_ISREG(status.st_mode) and others_write:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return f"others can write to it (mode {mode}); read it, and if it is good, take their right by chmod go-w"
    return ""


def open_unless_linked(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """Open a file, unless its path goes through a symbolic link of another user, and return its descriptor.

    A link in a folder that others can write to, as /tmp, could turn the writer against any file of its user. Links
    of this user and of root are followed. Also an `opener` of `open`.

    Args:
        path: of the file.
        flags: those of `os.open`; the descriptor is closed in programs that are started.
        mode: of a file that is made.

    Raises:
        PermissionError: another user has made the path, or a folder above it, a symbolic link.
        OSError: the file cannot be opened.
    """
    follow = 0 if _is_own_link(Path(path)) else os.O_NOFOLLOW
    return os.open(path, flags | follow | os.O_CLOEXEC, mode)


def _is_own_link(path: Path) -> bool:
    """Return whether the path itself is a link that may be followed.

    Raises:
        PermissionError: it, or a folder above it, is one that may not.
    """
    at = path.absolute()
    links = [each for each in (at, *at.parents) if each.is_symlink()]
    for each in links:
        owner = each.lstat().st_uid
        if owner not in (0, os.geteuid()):
            raise PermissionError(
                errno.EPERM, f"{each} is a symbolic link of the user with the number {owner}, so it is not followed"
            )
    return at in links


def open_recording(path: Path) -> BinaryIO:
    """Return the file, empty, without a buffer, and this process's own until it ends or closes it.

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
    """Return whether another process, where file systems tell, has opened it by `open_recording`, and lives.

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
