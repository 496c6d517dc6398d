"""The viewer's end of the connection to a job."""

from __future__ import annotations

import os
import select
import socket
import time

from poprun.errors import PopRunError
from poprun.ipc import wire
from poprun.ipc.sockets import connect
from poprun.monitor.doors import CHALLENGE, FULL, RANDOM_BYTES, SEEN, TOKEN_VARIABLE, WELCOME, answer_to, is_welcome
from poprun.monitor.snapshot import Snapshot

CONNECT_LIMIT_S = 5.0
"""The time in which poprun has to answer and to prove that it is the one."""
_READ_BYTES = 1 << 16


class SnapshotSource:
    """The snapshots of a job as they come; `where` names the job in messages."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self._connection = connection
        self._where = where
        self._reader = wire.MessageReader()
        self._came: list[tuple[int, bytes]] = []

    def next(self, limit_s: float) -> Snapshot | None:
        """Return the next snapshot; None once the job is over.

        Raises:
            TimeoutError: none has come in time.
            PopRunError: what comes cannot be understood.
        """
        try:
            message = self.next_message(limit_s)
            if message is not None and message[0] == FULL:
                raise PopRunError(f"{self._where} has too many viewers already; close one of them, and try again")
            if message is not None and message[0] != SEEN:
                raise ValueError(f"a message of kind {message[0]} has come")
            return None if message is None else Snapshot.unpack(message[1])
        except ValueError as error:
            raise PopRunError(f"{self._where}: {error}; use the version of poprun that runs the job") from None

    def next_message(self, limit_s: float) -> tuple[int, bytes] | None:
        """Return the next message of any kind; None at the end of the connection.

        Raises:
            TimeoutError: none has come in time.
            ValueError: one is too long.
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
        return self._came.pop(0)

    def send(self, message: bytes) -> None:
        """Send an answer."""
        self._connection.sendall(message)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def call_local(name: str, where: str) -> SnapshotSource:
    """Connect to the door `name` of a job on this machine.

    Raises:
        PopRunError: it is over, or another user's.
    """
    try:
        return SnapshotSource(connect(name), where)
    except OSError:
        raise PopRunError(f"{where} has ended, or is another user's; poprun top lists those that run") from None


def call_remote(host: str, port: int, token: str) -> SnapshotSource:
    """Connect to a job on another host whose poprun proves that it knows the token.

    Raises:
        PopRunError: nobody answers there, or somebody who has another token.
    """
    where = f"{host}:{port}"
    try:
        source = SnapshotSource(socket.create_connection((host, port), timeout=CONNECT_LIMIT_S), where)
    except OSError as error:
        fact = error.strerror or str(error)
        raise PopRunError(
            f"{where} cannot be reached: {fact}; is the job running, with --top-address, and no firewall between?"
        ) from None
    try:
        _greet(source, token, where)
    except BaseException:
        source.close()
        raise
    return source


def _greet(source: SnapshotSource, token: str, where: str) -> None:
    own = os.urandom(RANDOM_BYTES)
    try:
        message = source.next_message(CONNECT_LIMIT_S)
        if message is None or message[0] != CHALLENGE:
            raise PopRunError(f"{where} is no poprun; check the address")
        challenge = message[1]
        source.send(answer_to(token, challenge, own))
        message = source.next_message(CONNECT_LIMIT_S)
    except (ValueError, TimeoutError, ConnectionError) as error:
        raise PopRunError(f"{where} does not answer as a poprun does: {error}; check the address") from None
    if message is not None and message[0] == FULL:
        raise PopRunError(f"{where} has too many viewers already; close one of them, and try again")
    if message is None:
        raise PopRunError(f"{where} has refused our token; set {TOKEN_VARIABLE} to that of the job")
    if message[0] != WELCOME or not is_welcome(token, challenge, own, message[1]):
        raise PopRunError(
            f"{where} does not know the token of {TOKEN_VARIABLE}, so it is not the job; check the address"
        )
