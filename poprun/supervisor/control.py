"""The socket at which the agents report to poprun."""

from __future__ import annotations

import errno
import hmac
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from poprun.ipc import wire
from poprun.ipc.keep_alive import keep_alive
from poprun.ipc.local_sockets import is_own, open_socket

GREETING_LIMIT_S = 20.0
"""How long somebody who has called may take to say who he is; an agent does it at once."""
MOST_STRANGERS = 16
"""So many more than there are instances may be connected without having said it."""
PAUSE_S = 0.5
"""After which another call is tried to be taken where descriptors or memory have run out."""

_READ_BYTES = 1 << 18
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Member:
    """poprun's end of the connection to one agent.

    Attributes:
        index: the instance; -1 until its agent has said so.
        lag_s: what is added to times on the agent's clock to have them on ours.
        fault: why the connection broke, where the kernel said so.
        called_at_s: when it was made.

    Args:
        connection: to it.
        token: what it has to prove that it belongs to the job.
        shares_clock: whether it runs on this machine.
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
        """For poll."""
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a short message; an agent that is gone is noticed when reading."""
        with suppress(OSError):
            self._connection.sendall(message)

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have come; sets `is_open` to false at the end."""
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
        """Take note of who it is; None, and the end of the connection, if it is no instance of this job.

        Args:
            content: of its HELLO.
            count: how many instances the job has.

        Returns:
            Its program's pid and its host.
        """
        try:
            index, pid, clock_s, token, host = wire.unpack_hello(content)
        except (ValueError, UnicodeDecodeError):
            self.is_open = False
            return None
        if not hmac.compare_digest(token, self._token) or index >= count:
            self.is_open = False
            return None
        self.index = index
        self.lag_s = 0.0 if self._shares_clock else time.monotonic() - clock_s
        return pid, host

    def close(self) -> None:
        """Close the connection, which tells the agent to end its instance."""
        self._connection.close()


class Reception:
    """A listening socket, which is there only until every agent has connected: one of this machine, or of a network.

    Attributes:
        is_open: whether it is there.
        shortage: what has run out, so that nobody could be let in lately; in the kernel's words.

    Args:
        interface: the address at which the other hosts reach us; "" where there are none.
        silence_s: after which silence a host counts as gone.
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
        """Where agents find it, and what they show to be let in; the part before the colon names the kind."""
        return f"{self._address} {self._token.hex()}"

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def is_ready(self, now_s: float) -> bool:
        """Whether to listen; for a short time after the last shortage there would be no end of events."""
        return self.is_open and now_s >= self._pause_until_s

    def accept(self, now_s: float) -> Member | None:
        """The next agent, or whoever else has called; None for another user of this machine, and if it failed."""
        try:
            connection = self._socket.accept()[0]
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._pause_until_s = now_s + PAUSE_S
                self.shortage = error.strerror or str(error)
            return None  # who has called may be gone already; see accept(2)
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
    """Those who have not said in time who they are; of too many of them, those who have called first.

    Args:
        members: all connections, in the order in which they were made.
        count: how many instances the job has.
        now_s: the time.
    """
    strangers = [member for member in members if member.index < 0]
    too_many = max(0, len(strangers) - count - MOST_STRANGERS)
    return [
        member
        for number, member in enumerate(strangers)
        if number < too_many or now_s >= member.called_at_s + GREETING_LIMIT_S
    ]
