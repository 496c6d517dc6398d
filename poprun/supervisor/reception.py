"""The socket for reports of agents: it admits the agents of the job, and turns strangers away."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from poprun.ipc import wire
from poprun.ipc.sockets import is_own, keep_alive, open_socket

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from poprun.supervisor.job_events import AgentOrder

GREETING_LIMIT_S = 20.0
"""The time limit for a caller to identify itself; an agent does so at once."""
MOST_STRANGERS = 16
"""The most unidentified callers, in addition to the number of instances."""
PAUSE_S = 0.5
"""The pause in accepting calls after descriptors or memory have run out."""

_READ_BYTES = 1 << 18
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Member:
    """poprun's end of the connection to one agent.

    Attributes:
        index: The instance's index; -1 until its agent has sent it.
        lag_s: The seconds to add to times on the agent's clock to get times on ours.
        fault: The kernel's text about a broken connection; "" if it gave none.
        called_at_s: The time at which the connection was made.

    Args:
        connection: The connected socket.
        token: The job's token, which the agent must send.
        shares_clock: Whether the agent runs on this machine, so that its clock is ours.
    """

    def __init__(self, connection: socket.socket, token: bytes, shares_clock: bool) -> None:
        self.is_open = True
        self.index = -1
        self.lag_s = 0.0
        self.fault = ""
        self.called_at_s = time.monotonic()
        self._connection = connection
        self._reader = wire.MessageReader(wire.MOST_OF_STRANGERS)
        self._token = token
        self._shares_clock = shares_clock

    def fileno(self) -> int:
        """Return the descriptor for poll."""
        return self._connection.fileno()

    def order(self, order: AgentOrder) -> None:
        """Send a command to the agent."""
        kind = order.command.value
        self.send(wire.pack_number(kind, order.number) if order.number else wire.pack(kind))

    def send(self, message: bytes) -> None:
        """Send a short message; if the agent is gone, the next `receive` notices it."""
        with suppress(OSError):
            self._connection.sendall(message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have come; at the end of the connection, set `is_open` to false."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError as error:
            data = b""
            self.fault = error.strerror or str(error)
        self.is_open = bool(data)
        try:
            return self._reader.feed(data)
        except ValueError as error:
            self.is_open = False
            self.fault = str(error)
            return []

    def meet(self, content: bytes, count: int) -> tuple[int, str] | None:
        """Check a HELLO and return the program's pid and host; if it is invalid, mark the connection as closed.

        Args:
            content: The content of the HELLO.
            count: The number of instances of the job.

        Returns:
            The pid and the host; None for a caller that does not belong to the job.
        """
        try:
            index, pid, clock_s, token, host = wire.unpack_hello(content)
        except (ValueError, UnicodeDecodeError):
            self.is_open = False
            return None
        from hmac import compare_digest  # takes some milliseconds to load, and mpirun has started by now

        if not compare_digest(token, self._token) or index >= count:
            self.is_open = False
            return None
        self.index = index
        self.lag_s = 0.0 if self._shares_clock else time.monotonic() - clock_s
        return pid, host

    def close(self) -> None:
        """Close the connection, which tells the agent to end its instance."""
        self._connection.close()


class Reception:
    """A listening socket for agents: local if the job runs on this machine only, else TCP.

    It is closed as soon as every agent has connected.

    Attributes:
        is_open: Whether the socket still listens.
        shortage: The kernel's text about the resource that has run out; "" if the last caller was accepted.

    Args:
        interface: The address at which other hosts reach this one; "" if there are no other hosts.
        silence_s: The seconds of silence after which a host counts as gone.
    """

    def __init__(self, interface: str = "", silence_s: float = 0.0) -> None:
        self._token = os.urandom(16)
        self._silence_s = silence_s
        self._is_local = not interface
        if interface:
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            self._socket = socket.socket(family)
            self._socket.bind((interface, 0))
            self._address = f"tcp:{interface},{self._socket.getsockname()[1]},{silence_s:g}"
        else:
            self._socket, name = open_socket()
            self._address = f"unix:{name}"
        self._socket.listen(4096)
        self._socket.setblocking(False)
        self._pause_until_s = 0.0
        self.is_open = True
        self.shortage = ""

    @property
    def contact(self) -> str:
        """The address for agents and the token that they send; the part before the colon is the kind of address."""
        return f"{self._address} {self._token.hex()}"

    def fileno(self) -> int:
        """Return the descriptor for poll."""
        return self._socket.fileno()

    def is_ready(self, now_s: float) -> bool:
        """Return whether to poll the socket. Right after a shortage, do not: poll would return at once each time."""
        return self.is_open and now_s >= self._pause_until_s

    def accept(self, now_s: float) -> Member | None:
        """Accept a caller; return None if accepting failed, or if the caller is another user of this machine."""
        try:
            connection = self._socket.accept()[0]
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._pause_until_s = now_s + PAUSE_S
                self.shortage = error.strerror or str(error)
            return None  # the caller may be gone already; see accept(2)
        self.shortage = ""
        try:
            if not self._is_local:
                keep_alive(connection, self._silence_s)
            elif not is_own(connection):
                raise PermissionError("another user of this machine")
        except OSError:
            connection.close()
            return None
        return Member(connection, self._token, shares_clock=self._is_local)

    def close(self) -> None:
        """Stop listening."""
        if self.is_open:
            self.is_open = False
            self._socket.close()


def strangers_to_leave(members: Sequence[Member], count: int, now_s: float) -> list[Member]:
    """Return the strangers to disconnect: the oldest of too many, and all that exceed `GREETING_LIMIT_S`."""
    strangers = [member for member in members if member.index < 0]
    too_many = max(0, len(strangers) - count - MOST_STRANGERS)
    return [
        member
        for number, member in enumerate(strangers)
        if number < too_many or now_s >= member.called_at_s + GREETING_LIMIT_S
    ]
