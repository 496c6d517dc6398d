"""Files and folders of one user: checks of owner, rights and links, and locks against a second writer."""

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
    """Make a folder and its missing parents, accessible to this user only. Existing folders are not changed.

    Raises:
        OSError: A folder cannot be made.
    """
    missing = [path for path in folder.parents if not path.exists()]
    for each in (*reversed(missing), folder):
        each.mkdir(mode=0o700, exist_ok=True)


def close_to_others(path: Path) -> None:
    """Remove all rights of others from a file or folder; this user's own rights are not changed.

    Raises:
        OSError: The rights cannot be changed.
    """
    path.chmod(path.stat().st_mode & stat.S_IRWXU)


def fault_of(folder: Path) -> str:
    """Return who else can change the content of a folder, with advice; "" if only this user and root can.

    The rules are those of OpenSSH for keys. The folder and its parents belong to this user or to root. No other user
    can write to them. Exceptions for parents: a sticky bit, as /tmp has, or a group with this user as its only member.

    Args:
        folder: Absolute path without symbolic links.

    Raises:
        OSError: A folder cannot be examined.
    """
    for path in (folder, *folder.parents):
        status = path.stat()
        if fault := _fault_of_owner(path, status):
            return fault
        if status.st_mode & _OTHERS_WRITE and (path == folder or not _is_safe_above(status)):
            return f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w {path}"
    return ""


def fault_of_entries(folder: Path) -> str:
    """Return who else can change the entries of a folder, with advice; "" if only this user and root can.

    Other users may have made entries before the folder got its present rights.

    Raises:
        OSError: The folder cannot be examined.
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
    """Return whether other users with write access to a folder still cannot replace this user's entries in it."""
    if status.st_mode & stat.S_ISVTX:
        return True
    return not status.st_mode & stat.S_IWOTH and _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Return whether this user is the only member of a group; many distributions make such a group for each user."""
    user = os.geteuid()
    try:
        names = {pwd.getpwuid(user).pw_name}
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        return False
    return members <= names and {each.pw_uid for each in pwd.getpwall() if each.pw_gid == group} == {user}


def fault_of_file(descriptor: int) -> str:
    """Return who else can change an open file, with advice; "" if only this user and root can.

    The file must belong to this user or to root. Nobody else may write to it, except for a group with this user as its
    only member. For pipes and terminals only the owner is checked.

    Raises:
        OSError: The file cannot be examined.
    """
    status, user = os.fstat(descriptor), os.geteuid()
    if status.st_uid not in (0, user):
        return f"it belongs to user {status.st_uid}, and this is user {user}; check its content, then copy it"
    others_write = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    if stat.S_ISREG(status.st_mode) and others_write:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return f"others can write to it (mode {mode}); check its content, then remove their right by chmod go-w"
    return ""


def open_unless_linked(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """Open a file and return its descriptor, unless its path goes through a symbolic link of another user.

    In a folder that others can write to, such as /tmp, a link could redirect the writer to any file of its user. Links
    of this user and of root are followed. The function is also an `opener` for `open`.

    Args:
        path: Path of the file.
        flags: Flags of `os.open`; the descriptor is always closed on exec.
        mode: Mode of a new file.

    Raises:
        PermissionError: The path, or a folder above it, is a symbolic link of another user.
        OSError: The file cannot be opened.
    """
    follow = 0 if _is_own_link(Path(path)) else os.O_NOFOLLOW
    return os.open(path, flags | follow | os.O_CLOEXEC, mode)


def _is_own_link(path: Path) -> bool:
    """Return whether the path itself is a link that may be followed.

    Raises:
        PermissionError: The path, or a folder above it, is a link that may not be followed.
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
    """Open an empty, unbuffered file that only this process writes until it closes the file or ends.

    Args:
        path: Path of the file. If another process writes to it, this process's id is added to the name.

    Raises:
        OSError: The file cannot be made.
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
    """Return whether a living process has opened the file by `open_recording`, if the file system has locks.

    Raises:
        OSError: The file cannot be opened.
    """
    with path.open("ab", buffering=0) as file:
        return not _lock(file)


def _open(path: Path) -> BinaryIO:
    return open(path, "ab", buffering=0, opener=open_unless_linked)


def _lock(file: BinaryIO) -> bool:
    """Lock the file by a POSIX lock: these work on network file systems and are not inherited by forked processes."""
    with suppress(OSError):  # some file systems have no locks
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
