"""A server of tokens, one per core, by which the processes of a test run let in only what fits on the machine.

A test takes as many tokens as it keeps cores busy (`@pytest.mark.cores(2)`), in the order of asking, and returns them
by closing its connection, so one that is killed returns them too.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

SERVER_VARIABLE = "TESTS_SHARE_CORES_AT"
"""Tells the workers of pytest-xdist where the server is."""


class TokenServer:
    """Gives out tokens until its process ends.

    Args:
        cores: how many there are; who asks for more gets them all.

    Attributes:
        address: of its socket, which has no file.
    """

    def __init__(self, cores: int) -> None:
        self.address = f"test-cores-{os.getpid()}-{secrets.token_hex(8)}"
        self._cores = self._free = cores
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(64)
        threading.Thread(target=self._listen, name="test-cores", daemon=True).start()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for tokens."""
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
            count = min(wanted[0], self._cores)
            turn = object()
            with self._changed:
                self._waiting.append(turn)
                self._changed.wait_for(lambda: self._waiting[0] is turn and count <= self._free)
                self._waiting.popleft()
                self._free -= count
                self._changed.notify_all()
            try:
                client.sendall(b"\1")
                client.recv(1)  # nothing comes but the end
            except OSError:
                pass
            finally:
                with self._changed:
                    self._free += count
                    self._changed.notify_all()


@contextmanager
def cores_of(address: str, count: int) -> Iterator[None]:
    """Hold `count` tokens of the server at this address, from when they are free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(f"\0{address}")
        server.sendall(bytes([count]))
        assert server.recv(1) == b"\1", (
            "the server of tokens has gone: the run of pytest that started this one has ended"
        )
        yield
