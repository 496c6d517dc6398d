"""The agent's connection to poprun."""

from __future__ import annotations

import contextlib

from poprun.ipc import wire
from poprun.ipc.sockets import keep_alive

TYPE_CHECKING = False  # that of `typing`, which takes too long to load
if TYPE_CHECKING:
    import socket


class ControlLink:
    """The socket to poprun; once it has failed, everything sent is dropped.

    Attributes:
        is_open: whether poprun may still be there.
        is_cut: whether it has ended because nothing came through any more, rather than by poprun's will or end.
    """

    def __init__(self, address: str) -> None:
        self.is_open = True
        self.is_cut = False
        self._socket = _connect(address)
        self._reader = wire.MessageReader()

    def fileno(self) -> int:
        """Return the descriptor for poll."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message, waiting while poprun is behind with its reading."""
        if self.is_open:
            try:
                self._socket.sendall(message)
            except OSError as error:
                self._fail(error)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have come; set `is_open` to false at the end."""
        try:
            data = self._socket.recv(65536)
        except OSError as error:
            data = b""
            self._fail(error)
        self.is_open = self.is_open and bool(data)
        return self._reader.feed(data)

    def cut(self) -> None:
        """Break the connection."""
        import socket

        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _fail(self, error: OSError) -> None:
        self.is_open = False
        self.is_cut = self.is_cut or not isinstance(error, ConnectionError)


def _connect(address: str) -> socket.socket:
    """Connect to poprun."""
    import socket  # the program has been started by now, so this costs no time

    scheme, _, place = address.partition(":")
    if scheme == "unix":
        from poprun.ipc.sockets import connect

        return connect(place)
    if scheme != "tcp":
        raise ValueError(f"the control address {address!r} is neither a unix: nor a tcp: address")
    host, port, silence_s = place.rsplit(",", 2)
    connection = socket.create_connection((host, int(port)), timeout=float(silence_s))
    connection.settimeout(None)
    keep_alive(connection, float(silence_s))
    return connection
