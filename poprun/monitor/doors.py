"""The sockets at which viewers connect to a job, the greeting there, and the viewer's end of the connection.

The greeting is a mutual challenge and response: it proves to both sides that the other one knows the job's token.
poprun sends a CHALLENGE. The viewer answers with random bytes of its own and a proof (ANSWER). poprun sends a proof too
(WELCOME), and then a SEEN each second. On one machine, the kernel identifies the caller, and only SEEN is sent.
"""

from __future__ import annotations

import hmac
import os
import re
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from popdist.records.proofs import RANDOM_BYTES, prove
from poprun.cli.log import Log
from poprun.errors import PopRunError, UsageError
from poprun.ipc import wire
from poprun.ipc.sockets import connect, open_socket
from poprun.monitor.snapshot import Snapshot

_PURPOSE = "poprun-top-{user}"
_BACKLOG = 16
_ADDRESS = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_ENTRY = re.compile(r" @(poprun-top-(\d+)-(\d+)-[0-9a-f]{12})$", re.MULTILINE)

TOKEN_VARIABLE = "POPDIST_JOB_TOKEN"  # noqa: S105 - the name of a variable
"""The variable with the token, also for workers of TF_CONFIG; poprun forwards it to other hosts by name."""

CHALLENGE = 96
"""From poprun: random bytes; only over a network."""
ANSWER = 97
"""From the viewer, as its only message: random bytes of the same number, and a proof."""
WELCOME = 98
"""From poprun: a proof."""
SEEN = 99
"""From poprun: a snapshot."""
FULL = 100
"""From poprun, as the last message: there are too many viewers."""

_VIEWER, _POPRUN = b"viewer", b"poprun"

CONNECT_LIMIT_S = 5.0
"""The time limit for poprun to answer and to prove knowledge of the token."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Door:
    """A socket at which viewers connect.

    Attributes:
        socket: The listening socket.
        token: The token that viewers must know; "" if they must be of the same user instead, as the kernel tells.
    """

    socket: socket.socket
    token: str = ""


def open_doors(address: str | None, environ: Mapping[str, str], log: Log) -> list[Door]:
    """Open the doors of a job: one for this user on this machine, and one at `HOST:PORT`, if given.

    Raises:
        PopRunError: If there is no token, or if poprun cannot listen at the address.
    """
    doors = [] if address is None else [_open_remote(address, environ, log)]
    try:
        listening, _ = open_socket(_PURPOSE.format(user=os.geteuid()))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        doors.append(Door(listening))
    except OSError as error:
        log.info(f"poprun top will not find this job: {error.strerror}")
    return doors


def read_address(text: str, option: str) -> tuple[str, int]:
    """Return the host and the port in `HOST:PORT`, `1.2.3.4:PORT` or `[::1]:PORT`.

    Raises:
        UsageError: If the text has another form.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{option} is {text!r}; write HOST:PORT or [IPv6]:PORT")
    return found["bracketed"] or found["plain"], int(found["port"])


def token_from(environ: Mapping[str, str], option: str) -> str:
    """Return the token of the job.

    Raises:
        UsageError: If the token is not set.
    """
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise UsageError(
            f"{option} needs the job's token, and {TOKEN_VARIABLE} is not set; set it to the same value for poprun and "
            f"for poprun top: export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
        )
    return token


def doors_in(listed: str, user: int) -> list[tuple[int, str]]:
    """Return the pid and the socket's name of each poprun of a user, from the text of /proc/net/unix."""
    found = {(int(pid), name) for name, owner, pid in _ENTRY.findall(listed) if int(owner) == user}
    return sorted(found)


def _open_remote(address: str, environ: Mapping[str, str], log: Log) -> Door:
    option = "--top-address"
    host, port = read_address(address, option)
    token = token_from(environ, option)
    try:
        listening = _listen(host, port)
    except OSError as error:
        raise PopRunError(
            f"{option} {address}: poprun cannot listen there: {error.strerror}; name an address of this machine and "
            "a free port"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    log.info(f"poprun top --address {shown}:{listening.getsockname()[1]} shows this job to everyone who has its token")
    return Door(listening, token)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def answer_to(token: str, challenge: bytes, own: bytes) -> bytes:
    """Return a viewer's ANSWER to a challenge."""
    return wire.pack(ANSWER, own + prove(token, _VIEWER, challenge + own))


def welcome_to(token: str, challenge: bytes, answer: bytes) -> bytes | None:
    """Return the WELCOME to an answer; None if the viewer does not know the token."""
    own, proof = answer[:RANDOM_BYTES], answer[RANDOM_BYTES:]
    if not hmac.compare_digest(proof, prove(token, _VIEWER, challenge + own)):
        return None
    return wire.pack(WELCOME, prove(token, _POPRUN, challenge + own))


def is_welcome(token: str, challenge: bytes, own: bytes, proof: bytes) -> bool:
    """Return whether the sender of a challenge and of this WELCOME knows the token."""
    return hmac.compare_digest(proof, prove(token, _POPRUN, challenge + own))


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
            TimeoutError: If no message has come within `limit_s`.
            ValueError: If a message is too long.
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
        """Send a message."""
        self._connection.sendall(message)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def call_local(name: str, where: str) -> SnapshotSource:
    """Connect to the socket `name` of a job on this machine.

    Raises:
        PopRunError: If the job is over, or belongs to another user.
    """
    try:
        return SnapshotSource(connect(name), where)
    except OSError:
        raise PopRunError(f"{where} has ended, or is another user's; poprun top lists the running jobs") from None


def call_remote(host: str, port: int, token: str) -> SnapshotSource:
    """Connect to a job on another host; its poprun must prove knowledge of the token.

    Raises:
        PopRunError: If no poprun answers there, or if it has another token.
    """
    where = f"{host}:{port}"
    try:
        source = SnapshotSource(socket.create_connection((host, port), timeout=CONNECT_LIMIT_S), where)
    except OSError as error:
        fact = error.strerror or str(error)
        raise PopRunError(
            f"{where} cannot be reached: {fact}; start the job with --top-address, and open its port in "
            "the firewalls between the hosts"
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
