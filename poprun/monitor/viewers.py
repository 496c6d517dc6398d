"""poprun's end of the connections to viewers; no viewer can delay the job.

A viewer has at most one unread snapshot; after it has read that one, it gets a new one. Nothing here blocks, except
`Viewers.pause`. A viewer sends nothing, or one request of `poprun resize`. It may end the connection.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from poprun.ipc import wire
from poprun.ipc.facts import Loss
from poprun.ipc.resizes import MOST_BYTES, RESIZE, RESIZED, ResizeAnswer, ResizeRequest
from poprun.ipc.sockets import is_own
from poprun.monitor.listener import FULL, SEEN, close_listener
from poprun.monitor.snapshot import Seen, Snapshot

INTERVAL_S = 1.0
"""The interval between snapshots."""
UNREAD_LIMIT_S = 30.0
"""The time limit for a viewer to read a snapshot."""
MOST_VIEWERS = 16
PAUSE_S = 1.0
"""The pause in accepting calls after descriptors have run out."""
_READ_BYTES = 1024
_SEND_BYTES = 1 << 16


class Viewer:
    """One connection of the user of the job.

    Attributes:
        number: The number of the connection.
        is_open: Whether to keep the connection.
        request: The request that it has sent, until somebody takes it; None without one.
    """

    def __init__(self, connection: socket.socket, now_s: float, number: int = 0) -> None:
        self.number = number
        self.is_open = True
        self.request: ResizeRequest | None = None
        self._is_asker = False
        self._next_s = self._read_at_s = now_s
        self._connection = connection
        self._reader = wire.MessageReader(MOST_BYTES)
        self._unsent = bytearray()
        connection.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor for poll."""
        return self._connection.fileno()

    @property
    def events(self) -> int:
        """The events to poll for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def serve(self) -> None:
        """Read messages of the viewer, and send as much as it takes."""
        self._receive()
        self._send()

    def is_due(self, now_s: float) -> bool:
        """Return whether to send a snapshot now; close the connection if the last one is unread for too long."""
        if self._unsent:
            self.is_open = self.is_open and now_s < self._read_at_s + UNREAD_LIMIT_S
            return False
        self._read_at_s = now_s
        return self.is_open and not self._is_asker and now_s >= self._next_s

    def answer(self, answer: ResizeAnswer) -> None:
        """Send the answer to the viewer's request."""
        self._unsent += wire.pack(RESIZED, answer.pack())
        self._send()

    def offer(self, message: bytes, now_s: float) -> None:
        """Send a snapshot."""
        self._next_s = now_s + INTERVAL_S
        self._unsent += message
        self._send()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _receive(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self._is_asker:  # it has gone, or sends more than it may
            self.is_open = False
            return
        try:
            for kind, content in self._reader.feed(data):
                if kind != RESIZE or self._is_asker:
                    raise ValueError("only one request may come")
                self._is_asker, self.request = True, ResizeRequest.unpack(content)
        except ValueError:
            self.is_open = False

    def _send(self) -> None:
        try:
            while self._unsent and self.is_open:
                del self._unsent[: self._connection.send(self._unsent[:_SEND_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False


class Viewers:
    """All viewers of a job, during all attempts at it.

    Args:
        listener: The socket of `open_listener`; None if nobody may connect.
        program: The words of the program.
        now_s: The clock.

    Attributes:
        attempt: The number of restarts of the job.
    """

    def __init__(
        self,
        listener: socket.socket | None = None,
        program: Sequence[str] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attempt = 0
        self._listener = listener
        self._program = tuple(program)
        self._now_s = now_s
        self._began_s = now_s()
        self._viewers: list[Viewer] = []
        self._numbers = itertools.count(1)
        self._pause_until_s = 0.0

    def handlers(self, now_s: float) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Yield descriptors to poll, the events to poll for, and the function to call after an event."""
        if self._listener is not None and now_s >= self._pause_until_s:
            yield self._listener.fileno(), select.POLLIN, partial(self._accept, self._listener)
        for viewer in self._viewers:
            yield viewer.fileno(), viewer.events, viewer.serve

    def push(self, now_s: float, look: Callable[[], tuple[Seen, ...]], losses: Sequence[Loss] = ()) -> None:
        """Send a snapshot to each viewer in due time; disconnect viewers that have gone or do not read.

        Args:
            now_s: The time.
            look: Returns the states of the instances; called only if a viewer is due.
            losses: The lost instances and spares without which the job goes on.
        """
        if not self._viewers:
            return
        due = [viewer for viewer in self._viewers if viewer.is_due(now_s)]
        if due:
            message = wire.pack(SEEN, self._snapshot(now_s, look(), losses).pack())
            for viewer in due:
                viewer.offer(message, now_s)
        for viewer in [viewer for viewer in self._viewers if not viewer.is_open]:
            self._viewers.remove(viewer)
            viewer.close()

    def take_requests(self) -> list[tuple[int, ResizeRequest]]:
        """Return the requests that have come, each with the number of its connection."""
        askers = [viewer for viewer in self._viewers if viewer.request is not None]
        requests = [(viewer.number, viewer.request) for viewer in askers if viewer.request is not None]
        for viewer in askers:
            viewer.request = None
        return requests

    def answer(self, asker: int, answer: ResizeAnswer) -> None:
        """Answer the request from a connection; do nothing if the asker has gone."""
        for viewer in self._viewers:
            if viewer.number == asker:
                viewer.answer(answer)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds` between two attempts; viewers get snapshots without instances meanwhile."""
        until_s = self._now_s() + seconds
        while (left_s := until_s - self._now_s()) > 0:
            poll = select.poll()
            handlers = {}
            for descriptor, events, serve in self.handlers(self._now_s()):
                poll.register(descriptor, events)
                handlers[descriptor] = serve
            for descriptor, _ in poll.poll(1000 * min(left_s, INTERVAL_S)):
                handlers[descriptor]()
            self.push(self._now_s(), tuple)

    def close(self) -> None:
        """Close all connections and the socket at the end of the job."""
        for viewer in self._viewers:
            viewer.close()
        if self._listener is not None:
            close_listener(self._listener)
        self._viewers, self._listener = [], None

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = listener.accept()[0]
        except BlockingIOError:
            return  # the caller is gone already
        except OSError:
            self._pause_until_s = self._now_s() + PAUSE_S
            return
        with suppress(OSError):
            if is_own(connection) and len(self._viewers) < MOST_VIEWERS:
                self._viewers.append(Viewer(connection, self._now_s(), next(self._numbers)))
                return
            if is_own(connection):
                connection.send(wire.pack(FULL))
        connection.close()

    def _snapshot(self, now_s: float, instances: tuple[Seen, ...], losses: Sequence[Loss]) -> Snapshot:
        return Snapshot(
            pid=os.getpid(),
            host=os.uname().nodename,
            program=self._program,
            age_s=now_s - self._began_s,
            attempt=self.attempt,
            losses=sum(not loss.was_spare for loss in losses),
            instances=instances,
            replaced=sum(loss.is_replaced for loss in losses),
        )
