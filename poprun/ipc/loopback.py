"""Keeps Open MPI off the network where a job has one host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

TYPE_CHECKING = False  # that of `typing`
if TYPE_CHECKING:
    import socket

_NETWORKS = ("btl_tcp_if_include", "btl_tcp_if_exclude", "btl")
_GET_DESCRIPTOR = 438  # pidfd_getfd(2), of the same number on all architectures
_LOOPBACK = b"lo"


def loopback_variables(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What has instances offer, and accept, connections over TCP on the loopback interface only.

    They share memory, and need TCP only to reach what they spawn. The user who names networks, or transports, is
    obeyed.

    Args:
        arguments: the user's options for mpirun.
        environ: the user's environment.
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
    """A socket of another process."""
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
