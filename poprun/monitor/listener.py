"""The local socket at which `poprun top` and `poprun resize` reach a job, and their end of a connection.

Only the user of a job, and root, may see or change the job. The kernel enforces this twice. The socket lies in a folder
that only its user may enter, so other users cannot connect. Both ends also ask the kernel for the user of the other end
(SO_PEERCRED in unix(7)), and hang up on another user. Nothing listens on a network: on another host, `ssh HOST poprun
top` runs as the user there.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import stat
import time
from contextlib import suppress

from poprun.cli.log import Log
from poprun.errors import PopRunError
from poprun.ipc import wire
from poprun.ipc.sockets import is_own
from poprun.monitor.snapshot import Snapshot

_BACKLOG = 16

SEEN = 99
"""From poprun: a snapshot."""
FULL = 100
"""From poprun, as the last message: there are too many viewers."""

_READ_BYTES = 1 << 16


def own_folder() -> str:
    """Return the path of the folder for this user's sockets.

    Unlike TMPDIR and XDG_RUNTIME_DIR, it is the same in all sessions of the user.
    """
    return f"/tmp/poprun-{os.geteuid()}"  # noqa: S108 - `check_private` judges the folder


def check_private(folder: str) -> None:
    """Refuse a folder that another user has made, or may enter.

    Raises:
        FileNotFoundError: The folder does not exist.
        PermissionError: It is no folder (but perhaps a link to one), or not of this user alone.
    """
    status = os.lstat(folder)
    is_of_user = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_of_user or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, f"{folder} is no folder of yours with mode 0700; its owner has to remove it")


def open_listener(log: Log, folder: str) -> socket.socket | None:
    """Open the socket of this job in a folder, which is made if it is missing; None, and a line in the log, on failure.

    The socket gets its name after it listens. So a socket that refuses connections is of a job that was killed.
    """
    listener = socket.socket(socket.AF_UNIX)
    path = f"{folder}/{_host()}-{os.getpid()}"
    try:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        check_private(folder)
        find_jobs(folder)  # removes what killed jobs have left
        listener.bind(f"{path}.new")
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        os.rename(f"{path}.new", path)
    except OSError as error:
        listener.close()
        log.info(f"poprun top will not find this job: {error.strerror}")
        return None
    return listener


def close_listener(listener: socket.socket) -> None:
    """Close a socket of `open_listener`, and remove its name."""
    path = listener.getsockname().removesuffix(".new")
    listener.close()
    with suppress(OSError):
        os.unlink(path)


def find_jobs(folder: str) -> list[int]:
    """Return the pids of this user's running jobs on this machine, and remove what killed jobs have left.

    Raises:
        PopRunError: Another user could have put sockets into the folder.
    """
    try:
        check_private(folder)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise PopRunError(f"jobs of yours cannot be found safely: {error.strerror}") from None
    name = re.compile(rf"{re.escape(_host())}-(\d+)")
    pids = sorted(int(match[1]) for entry in os.listdir(folder) if (match := name.fullmatch(entry)))
    return [pid for pid in pids if _is_running(f"{folder}/{_host()}-{pid}")]


def _host() -> str:
    """Return the name of this machine; hosts and containers may share a folder."""
    return os.uname().nodename


def _is_running(path: str) -> bool:
    try:
        _connect(path).close()
    except ConnectionRefusedError:
        with suppress(OSError):
            os.unlink(path)
        return False
    except OSError as error:  # FileNotFoundError: the job has just ended
        return isinstance(error, BlockingIOError)
    return True


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)  # a stopped poprun whose queue is full would block
    try:
        connection.connect(path)
        if not is_own(connection):
            raise PermissionError(errno.EPERM, "the socket is another user's")
    except OSError:
        connection.close()
        raise
    connection.setblocking(True)
    return connection


class SnapshotSource:
    """The snapshots of a job as they come; `where` is the name of the job in messages."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self._connection = connection
        self._where = where
        self._reader = wire.MessageReader()
        self._came: list[tuple[int, bytes]] = []

    def next(self, limit_s: float) -> Snapshot | None:
        """Return the next snapshot; None after the end of the job.

        Raises:
            TimeoutError: If no snapshot has come within `limit_s`.
            PopRunError: If a message cannot be understood, or if the job has too many viewers.
        """
        try:
            message = self.next_message(limit_s)
            if message is not None and message[0] != SEEN:
                raise ValueError(f"a message of kind {message[0]} has come")
            return None if message is None else Snapshot.unpack(message[1])
        except ValueError as error:
            raise PopRunError(f"{self._where}: {error}; use the version of poprun that runs the job") from None

    def next_message(self, limit_s: float) -> tuple[int, bytes] | None:
        """Return the next message of any kind; None at the end of the connection.

        Raises:
            TimeoutError: If no message has come within `limit_s`.
            ValueError: If a message is too long.
            PopRunError: If the job has too many viewers.
        """
        until_s = time.monotonic() + limit_s
        while not self._came:
            ready, _, _ = select.select([self._connection], [], [], max(until_s - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"{self._where} has said nothing for {limit_s:g} s")
            try:
                data = self._connection.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                return None
            self._came += self._reader.feed(data)
        message = self._came.pop(0)
        if message[0] == FULL:
            raise PopRunError(
                f"{self._where} has too many viewers (poprun top) already; close one of them, and try again"
            )
        return message

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._connection.sendall(message)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def connect_to_job(folder: str, pid: int) -> SnapshotSource:
    """Connect to a job on this machine.

    Raises:
        PopRunError: If the job is over, or belongs to another user.
    """
    where = f"job {pid}"
    try:
        return SnapshotSource(_connect(f"{folder}/{_host()}-{pid}"), where)
    except BlockingIOError:
        raise PopRunError(f"{where} does not answer: its poprun may have been stopped; look at its terminal") from None
    except OSError:
        raise PopRunError(f"{where} has ended, or is another user's; poprun top lists the running jobs") from None
