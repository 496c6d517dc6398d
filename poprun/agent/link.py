"""The agent's connection to poprun."""

from __future__ import annotations

import contextlib

from poprun.ipc import wire
from poprun.ipc.sockets import keep_alive

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load
if TYPE_CHECKING:
    import socket


class ControlLink:
    """The socket to poprun; after a failure, everything sent is dropped.

    Attributes:
        is_open: Whether poprun may still be there.
        is_cut: Whether the network broke the connection; false if poprun closed it or ended.
    """

    def __init__(self, address: str) -> None:
        self.is_open = True
        self.is_cut = False
        self._socket = _connect(address)
        self._reader = wire.MessageReader()

    def fileno(self) -> int:
        """Return the descriptor of the socket, for poll."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message; block while poprun is behind with reading."""
        if self.is_open:
            try:
                self._socket.sendall(message)
            except OSError as error:
                self._fail(error)

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived; set `is_open` to false at the end of the connection."""
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
    import socket  # imported here, because the program runs by now and is not delayed

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
