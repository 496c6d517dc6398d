"""Server of tokens that limits the tests running at the same time to the cores of the machine.

A test takes a token for each core that it keeps busy (`@pytest.mark.cores(2)`). It returns the tokens by closing its
connection, so that a killed test returns them, too. There are three times as many tokens as cores: jobs of two or
three processes keep 0.7 of a core busy on average, because they wait for each other and for faults. Tests that need
fewer tokens may overtake a waiting one a few times.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SERVER_VARIABLE = "TESTS_SHARE_CORES_AT"
"""Tells the workers of pytest-xdist the address of the server."""

ALL = 255
"""More than all tokens, for a test that measures time with nothing beside it."""

PATIENCE = 8
"""The number of times that a waiting test may be overtaken."""


@dataclass(eq=False)
class _Turn:
    """A waiting client."""

    count: int
    patience: int = PATIENCE


class TokenServer:
    """A server that gives out tokens until its process ends.

    Args:
        tokens: The number of tokens; a client that asks for more gets them all.

    Attributes:
        address: The address of the server's abstract socket.
    """

    def __init__(self, tokens: int) -> None:
        self.address = f"test-cores-{os.getpid()}-{secrets.token_hex(8)}"
        self._free = self._most = tokens
        self._changed = threading.Condition()
        self._waiting: list[_Turn] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(64)
        threading.Thread(target=self._listen, name="test-cores", daemon=True).start()

    @property
    def is_awaited(self) -> bool:
        """Return whether a client waits for tokens."""
        return bool(self._waiting)

    def _listen(self) -> None:
        while True:
            client, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(client,), name="test-cores-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            wanted = client.recv(1)
            if not wanted:
                return
            turn = _Turn(min(wanted[0], self._most))
            with self._changed:
                self._waiting.append(turn)
                self._changed.wait_for(lambda: self._is_next(turn))
                for earlier in self._waiting[: self._waiting.index(turn)]:
                    earlier.patience -= 1
                self._waiting.remove(turn)
                self._free -= turn.count
                self._changed.notify_all()
            try:
                client.sendall(b"\1")
                client.recv(1)  # returns when the client closes the connection
            except OSError:
                pass
            finally:
                with self._changed:
                    self._free += turn.count
                    self._changed.notify_all()

    def _is_next(self, turn: _Turn) -> bool:
        earlier = self._waiting[: self._waiting.index(turn)]
        return turn.count <= self._free and all(each.count > self._free and each.patience for each in earlier)


@contextmanager
def cores_of(address: str, count: int) -> Iterator[None]:
    """Wait for `count` tokens of the server at this address, and hold them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(f"\0{address}")
        server.sendall(bytes([count]))
        assert server.recv(1) == b"\1", (
            "the server of tokens has gone: the run of pytest that started this one has ended"
        )
        yield
