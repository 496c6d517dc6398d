"""Folders whose files are run or trusted when they are read back: made for one user, refused where others can write."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

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
    """Who else can decide what lies in a folder, and what to do about it; empty where only this user and root can.

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
    """The same of what lies in the folder, which may be older than the rights that it has now.

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
    """Whether others who can write to a folder can still not replace what this user has in it."""
    if status.st_mode & stat.S_ISVTX:
        return True
    return not status.st_mode & stat.S_IWOTH and _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether nobody but this user is in a group: distributions make one for each user."""
    user = os.geteuid()
    try:
        names = {pwd.getpwuid(user).pw_name}
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        return False
    return members <= names and {each.pw_uid for each in pwd.getpwall() if each.pw_gid == group} == {user}


def fault_of_file(descriptor: int) -> str:
    """Who else can decide what is read from an open file, and what to do; empty where only this user and root can.

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
