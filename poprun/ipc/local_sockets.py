"""Sockets of this machine that have a name and no file, so that nothing is left of them when their process is killed.

Their names are in Linux' abstract namespace, see unix(7). Anybody on this machine may call them, so both sides look who
the other one is.
"""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # of the process at the other end: pid, user, group


def open_socket(purpose: str = "poprun") -> tuple[socket.socket, str]:
    """A socket to listen on, and its name, which begins with the purpose and our pid."""
    listening = socket.socket(socket.AF_UNIX)
    name = f"{purpose}-{os.getpid()}-{os.urandom(6).hex()}"
    listening.bind(f"\0{name}")
    return listening, name


def connect(name: str) -> socket.socket:
    """A connection to the socket of that name.

    Raises:
        ConnectionRefusedError: if there is none, or it is another user's.
    """
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
    """Whether the other end is a process of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
