"""Opening of files, which refuses paths through symbolic links of other users."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
