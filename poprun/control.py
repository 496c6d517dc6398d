"""The socket at which the shims report to poprun."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from poprun import wire

_READ_BYTES = 1 << 18


class Member:
    """poprun's end of the connection to one shim."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_open = True
        self.index = -1
        self._connection = connection
        self._reader = wire.MessageReader()

    def fileno(self) -> int:
        """For poll."""
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a short message; a shim that is gone is noticed when reading."""
        with suppress(OSError):
            self._connection.sendall(message)

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have come; sets `is_open` to false at the end."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        self.is_open = bool(data)
        return self._reader.feed(data)

    def close(self) -> None:
        """Close the connection, which tells the shim to end its instance."""
        self._connection.close()


class Reception:
    """A listening Unix socket in a private directory, which is there only until every shim has connected."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._directory = _make_directory(environ.get("TMPDIR") or "/tmp")
        self._path = os.path.join(self._directory, "control")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._path)
        self._socket.listen(4096)
        self.is_open = True

    @property
    def address(self) -> str:
        """Where shims find it; the part before the colon names the kind."""
        return f"unix:{self._path}"

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def accept(self) -> Member:
        """The next shim."""
        return Member(self._socket.accept()[0])

    def close(self) -> None:
        """Stop listening and remove every trace."""
        if self.is_open:
            self.is_open = False
            self._socket.close()
            with suppress(OSError):
                os.unlink(self._path)
                os.rmdir(self._directory)


def _make_directory(parent: str) -> str:
    """A directory that nobody else can enter; below /tmp where the path of a socket would become too long."""
    name = f"poprun-{os.getpid()}-{os.urandom(6).hex()}"
    for place in (parent, "/tmp"):
        path = os.path.join(place, name)
        if len(path) < 90:
            with suppress(FileNotFoundError, PermissionError):
                os.mkdir(path, 0o700)
                return path
    raise OSError(f"cannot make a directory below {parent} or /tmp; set TMPDIR to a short path that is writable")
