"""The connection between the launching process and an instance: greeting and messages.

The greeting is a mutual challenge and response. Both sides prove that they know the token of the launch, which is never
sent. Nothing is unpickled before, because a pickle can run any code. On this machine the socket has a name in Linux'
abstract namespace (unix(7)), so that no file is left. Instances on other hosts use TCP, and nothing is encrypted there.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import select
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from popdist.environments.poprun import ADDRESS_VARIABLE, NETWORK_VARIABLE, TOKEN_VARIABLE
from popdist.errors import LaunchError
from popdist.records.proofs import RANDOM_BYTES, prove

GREETING_LIMIT_S = 20.0
"""Time limit for the other side of a new connection to prove that it knows the token."""
FUNCTION_LIMIT_S = 300.0
"""Time limit for the launching process to send the next part of the function."""

_INSTANCE, _LAUNCHER = b"instance", b"launcher"
_HEAD = struct.Struct("!BI")
_LENGTH = struct.Struct("!Q")
_PROOF_BYTES = 32

Part = bytes | bytearray | memoryview


class MessageKind(Enum):
    """A kind of message; the sender and the parts are given.

    Attributes:
        READY: Instance: it waits for the function. No parts.
        FUNCTION: Launching process: the setup as JSON, then the pickled call and its buffers.
        RESULT: Instance: who it is as JSON, then the pickled result and its buffers.
        FAILURE: Instance: who it is and the error as JSON, then the pickled exception and its buffers, if possible.
        LISTEN: poprun: an address of this machine that other hosts reach.
        LISTENING: Launching process: the port.
    """

    READY = 1
    FUNCTION = 2
    RESULT = 3
    FAILURE = 4
    LISTEN = 5
    LISTENING = 6


@dataclass(frozen=True)
class LaunchMessage:
    """One message.

    Attributes:
        kind: The kind.
        parts: The content. Received parts can be written, so that arrays may use their memory.
    """

    kind: MessageKind
    parts: Sequence[Part] = ()


class LaunchChannel:
    """One end of a connection whose other end has proved that it knows the token."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: LaunchMessage) -> None:
        """Send a message; wait until the other side has taken it.

        Raises:
            OSError: The connection has ended, or the time limit has passed.
        """
        parts = [memoryview(part).cast("B") for part in message.parts]
        head = _HEAD.pack(message.kind.value, len(parts))
        self._connection.sendall(head + b"".join(_LENGTH.pack(part.nbytes) for part in parts))
        for part in parts:
            self._connection.sendall(part)

    def receive(self) -> LaunchMessage:
        """Wait for a message and return it.

        Raises:
            OSError: The connection has ended, or the time limit has passed.
        """
        kind, count = _HEAD.unpack(_receive_exactly(self._connection, _HEAD.size))
        lengths = _receive_exactly(self._connection, count * _LENGTH.size)
        sizes = [each for (each,) in _LENGTH.iter_unpack(lengths)]
        return LaunchMessage(MessageKind(kind), [_receive_exactly(self._connection, size) for size in sizes])

    def limit(self, limit_s: float | None) -> None:
        """Set the time limit of each further wait; None for no limit."""
        self._connection.settimeout(limit_s)

    def end_with(self) -> None:
        """Give the connection to the kernel, which sends this process SIGTERM when the other side closes (fcntl(2)).

        Raises:
            OSError: It has closed.
        """
        descriptor = self._connection.detach()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([descriptor], [], [], 0)[0]:
            raise ConnectionResetError("the other side has closed the connection")

    def close(self) -> None:
        """End the connection, and with it the waits of other threads."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def admit(connection: socket.socket, token: str) -> LaunchChannel:
    """Greet a caller, as the launching process.

    Raises:
        OSError: The caller does not know the token, has gone, or has said nothing for `GREETING_LIMIT_S`.
    """
    connection.settimeout(GREETING_LIMIT_S)
    challenge = os.urandom(RANDOM_BYTES)
    connection.sendall(challenge)
    answer = bytes(_receive_exactly(connection, RANDOM_BYTES + _PROOF_BYTES))
    own, proof = answer[:RANDOM_BYTES], answer[RANDOM_BYTES:]
    if not hmac.compare_digest(proof, prove(token, _INSTANCE, challenge + own)):
        raise ConnectionRefusedError("the caller does not know the token of the launch")
    connection.sendall(prove(token, _LAUNCHER, challenge + own))
    connection.settimeout(None)
    return LaunchChannel(connection)


def call(environ: Mapping[str, str]) -> LaunchChannel:
    """Connect to the launching process that the variables of this process name, and greet it.

    Raises:
        LaunchError: It cannot be reached, or it does not know the token.
    """
    connection = None
    try:
        connection = _connect(environ)
        _greet(connection, environ[TOKEN_VARIABLE])
    except (OSError, KeyError, ValueError) as error:
        if connection is not None:
            connection.close()
        raise LaunchError(
            f"the process that called popdist.launch cannot be reached: {error!r}; it may have ended. If this host is "
            "another one, open the ports between the hosts in their firewalls"
        ) from None
    return LaunchChannel(connection)


def _connect(environ: Mapping[str, str]) -> socket.socket:
    if address := environ.get(NETWORK_VARIABLE):
        host, port = address.split(" ")
        return socket.create_connection((host, int(port)), timeout=GREETING_LIMIT_S)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{environ[ADDRESS_VARIABLE]}")  # with a time limit, a full backlog would be an error
    except BaseException:
        connection.close()
        raise
    connection.settimeout(GREETING_LIMIT_S)
    return connection


def _greet(connection: socket.socket, token: str) -> None:
    challenge, own = bytes(_receive_exactly(connection, RANDOM_BYTES)), os.urandom(RANDOM_BYTES)
    connection.sendall(own + prove(token, _INSTANCE, challenge + own))
    proof = bytes(_receive_exactly(connection, _PROOF_BYTES))
    if not hmac.compare_digest(proof, prove(token, _LAUNCHER, challenge + own)):
        raise ConnectionRefusedError("the process at that address does not know the token of the launch")


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionResetError("the other side has closed the connection")
        view = view[received:]
    return data
