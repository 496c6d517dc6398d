"""Sockets: local sockets without a file, TCP connections that notice a dead network, and the loopback interface.

Local sockets have names in Linux' abstract namespace (unix(7)), so nothing is left of them when their process is
killed. Every user of the machine can connect to them, so both ends check each other's user. The agent loads this file
before the program starts, so functions import `socket` themselves.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from math import ceil

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load for the agent
if TYPE_CHECKING:
    import socket

_CREDENTIALS = struct.Struct("iII")  # pid, user and group of the process at the other end


def open_socket(purpose: str = "poprun") -> tuple[socket.socket, str]:
    """Open a local socket to listen on; return it and its name, which begins with the purpose and this process's id."""
    import socket

    listening = socket.socket(socket.AF_UNIX)
    name = f"{purpose}-{os.getpid()}-{os.urandom(6).hex()}"
    listening.bind(f"\0{name}")
    return listening, name


def connect(name: str) -> socket.socket:
    """Connect to the local socket with this name.

    Raises:
        ConnectionRefusedError: No such socket exists, or it is another user's.
    """
    import socket

    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        if not is_own(connection):
            raise ConnectionRefusedError(f"the socket {name} is another user's")
    except OSError:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Return whether the other end is a process of the same user."""
    import socket

    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


MOST_PROBES = 127
LONGEST_PAUSE_S = 32767
"""The limits of Linux (MAX_TCP_KEEPCNT, MAX_TCP_KEEPIDLE in net/tcp.h)."""
_LARGEST_INT = (1 << 31) - 1


def probing_times(silence_s: float, first_s: int = 0) -> tuple[int, int, int]:
    """Return the parameters of TCP keepalive: seconds until the first probe, seconds between probes, number of probes.

    Together they take `silence_s`, rounded up to whole seconds that the kernel can represent, and at least 2. The last
    message of a quiet host may be up to `first_s` old when the host fails. Then the host is given up earlier.

    Args:
        silence_s: Seconds of silence after which a host is given up.
        first_s: Seconds until the first probe. 0: a third of `silence_s`.
    """
    first_s = first_s or min(max(1, int(silence_s / 3)), LONGEST_PAUSE_S)
    rest_s = max(1, ceil(silence_s) - first_s)
    interval_s = min(-(-rest_s // MOST_PROBES), LONGEST_PAUSE_S)
    return first_s, interval_s, min(-(-rest_s // interval_s), MOST_PROBES)


def keep_alive(connection: socket.socket, silence_s: float) -> None:
    """Let TCP end a connection `silence_s` after the other host's last answer; shorter interruptions do no harm."""
    import socket

    first_s, interval_s, probes = probing_times(silence_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, first_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(silence_s * 1000), _LARGEST_INT))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_GET_DESCRIPTOR = 438  # pidfd_getfd(2); the number is the same on all architectures
_LOOPBACK = b"lo"


def keep_to_loopback(pid: int) -> None:
    """Restrict the listening TCP sockets of a child process to the loopback interface.

    mpirun (5.0.11) has no option for this. If the kernel does not allow it (before 5.7, or in a container without
    ptrace), the sockets stay as they are.
    """
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    _bind(_take(handle, int(name)))
        finally:
            os.close(handle)


def _take(handle: int, descriptor: int) -> socket.socket:
    """Take a copy of another process's socket."""
    import socket

    libc = ctypes.CDLL(None, use_errno=True)
    taken = libc.syscall(_GET_DESCRIPTOR, handle, descriptor, 0)
    if taken < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return socket.socket(fileno=taken)


def _bind(taken: socket.socket) -> None:
    import socket

    with taken:
        is_tcp = taken.family in (socket.AF_INET, socket.AF_INET6) and taken.type == socket.SOCK_STREAM
        if is_tcp and taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
