"""Sockets: local ones without a file, TCP connections that notice a dead network, and the loopback interface.

Local sockets have names in Linux' abstract namespace, see unix(7), so that nothing is left of them when their process
is killed. Anybody on this machine may call them, so both sides check who the other one is. The agent loads this file
before the program has started, so functions import `socket` themselves.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import ceil

TYPE_CHECKING = False  # that of `typing`, which takes too long to load for the agent
if TYPE_CHECKING:
    import socket

_CREDENTIALS = struct.Struct("iII")  # of the process at the other end: pid, user, group


def open_socket(purpose: str = "poprun") -> tuple[socket.socket, str]:
    """Open a socket to listen on; return it and its name, which begins with the purpose and our pid."""
    import socket

    listening = socket.socket(socket.AF_UNIX)
    name = f"{purpose}-{os.getpid()}-{os.urandom(6).hex()}"
    listening.bind(f"\0{name}")
    return listening, name


def connect(name: str) -> socket.socket:
    """Connect to the socket of that name.

    Raises:
        ConnectionRefusedError: if there is none, or it is another user's.
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
    """Return TCP's seconds until the first probe and between probes, and the number of probes.

    All together take `silence_s`, rounded up to whole seconds that the kernel has numbers for, and at least 2. A host
    that has nothing else to say was heard up to `first_s` before it fell silent, and is given up so much earlier.

    Args:
        silence_s: after which a host is given up.
        first_s: the time until the first probe; 0: a third of that.
    """
    first_s = first_s or min(max(1, int(silence_s / 3)), LONGEST_PAUSE_S)
    rest_s = max(1, ceil(silence_s) - first_s)
    interval_s = min(-(-rest_s // MOST_PROBES), LONGEST_PAUSE_S)
    return first_s, interval_s, min(-(-rest_s // interval_s), MOST_PROBES)


def keep_alive(connection: socket.socket, silence_s: float) -> None:
    """Have TCP end a connection `silence_s` after the other host's last answer; shorter hiccups do no harm."""
    import socket

    first_s, interval_s, probes = probing_times(silence_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, first_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(silence_s * 1000), _LARGEST_INT))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_NETWORKS = ("btl_tcp_if_include", "btl_tcp_if_exclude", "btl")
_GET_DESCRIPTOR = 438  # pidfd_getfd(2), of the same number on all architectures
_LOOPBACK = b"lo"


def loopback_variables(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep instances' TCP connections on the loopback interface.

    They share memory, and need TCP only to reach what they spawn. The user who names networks, or transports, is
    obeyed.
    """
    if any(name in arguments or f"OMPI_MCA_{name}" in environ for name in _NETWORKS):
        return {}
    return {"OMPI_MCA_btl_tcp_if_include": _LOOPBACK.decode()}


def keep_to_loopback(pid: int) -> None:
    """Have sockets at which a child process of ours listens to any network listen to the loopback interface only.

    mpirun (5.0.11) has no option for its own. Where the kernel does not let us (before 5.7, or in a container without
    ptrace) they stay as they are.
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
