"""poprun's end of the connections to viewers; no viewer can delay the job.

A viewer has at most one unread snapshot; after it has read that one, it gets a new one. Nothing here blocks, except
`Viewers.pause`. A viewer sends only its answer to a challenge, or, on the machine of poprun, a request of
`poprun resize`. It may end the connection.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from popdist.records.proofs import RANDOM_BYTES
from poprun.ipc import wire
from poprun.ipc.facts import Loss
from poprun.ipc.resizes import MOST_BYTES, RESIZE, RESIZED, ResizeAnswer, ResizeRequest
from poprun.ipc.sockets import is_own
from poprun.monitor.doors import ANSWER, CHALLENGE, FULL, SEEN, Door, welcome_to
from poprun.monitor.snapshot import Seen, Snapshot

INTERVAL_S = 1.0
"""The interval between snapshots."""
GREETING_LIMIT_S = 5.0
"""The time limit for a viewer to prove knowledge of the token."""
UNREAD_LIMIT_S = 30.0
"""The time limit for a viewer to read a snapshot."""
MOST_VIEWERS = 16
PAUSE_S = 1.0
"""The pause in accepting calls after descriptors have run out."""
_READ_BYTES = 1024
_SEND_BYTES = 1 << 16


class Viewer:
    """One connection; if `token` is not empty, the viewer must prove that it knows the token before it gets snapshots.

    Attributes:
        number: The number of the connection.
        is_open: Whether to keep the connection.
        is_welcome: Whether the viewer gets snapshots.
        request: The request that it has sent, until somebody takes it; None without one.
        called_at_s: The time of its call.
    """

    def __init__(self, connection: socket.socket, token: str, now_s: float, number: int = 0) -> None:
        self.number = number
        self.is_open = True
        self.is_welcome = not token
        self.called_at_s = self._read_at_s = now_s
        self.request: ResizeRequest | None = None
        self._is_asker = False
        self._next_s = now_s
        self._connection = connection
        self._token = token
        self._reader = wire.MessageReader(wire.MOST_OF_STRANGERS if token else MOST_BYTES)
        self._unsent = bytearray()
        self._challenge = os.urandom(RANDOM_BYTES)
        connection.setblocking(False)
        if token:
            self._unsent += wire.pack(CHALLENGE, self._challenge)
            self._send()

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
        return self.is_open and self.is_welcome and not self._is_asker and now_s >= self._next_s

    def answer(self, answer: ResizeAnswer) -> None:
        """Send the answer to the viewer's request."""
        self._unsent += wire.pack(RESIZED, answer.pack())
        self._send()

    def offer(self, message: bytes, now_s: float) -> None:
        """Send a snapshot."""
        self._next_s = now_s + INTERVAL_S
        self._unsent += message
        self._send()

    def refuse(self) -> None:
        """Tell the viewer that there are too many viewers."""
        if not self._unsent or not self.is_welcome:
            self._unsent += wire.pack(FULL)
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
        if not data or self._is_asker or (self._token and self.is_welcome):  # it has gone, or sends more than it may
            self.is_open = False
            return
        try:
            messages = self._reader.feed(data)
            if not self._token:
                self._take_request(messages)
                return
        except ValueError:
            self.is_open = False
            return
        for kind, content in messages[:1]:
            welcome = welcome_to(self._token, self._challenge, content) if kind == ANSWER else None
            self.is_open = self.is_welcome = welcome is not None and len(messages) == 1
            self._unsent += welcome or b""

    def _take_request(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Take the request of a viewer whom the kernel has identified as a process of our user.

        Raises:
            ValueError: It is no request.
        """
        for kind, content in messages:
            if kind != RESIZE or self._is_asker:
                raise ValueError("only one request may come")
            self._is_asker, self.request = True, ResizeRequest.unpack(content)

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
        doors: The sockets at which viewers call; empty if nobody may connect.
        program: The words of the program.
        now_s: The clock.

    Attributes:
        attempt: The number of restarts of the job.
    """

    def __init__(
        self, doors: Sequence[Door] = (), program: Sequence[str] = (), now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.attempt = 0
        self._doors = doors
        self._program = tuple(program)
        self._now_s = now_s
        self._began_s = now_s()
        self._viewers: list[Viewer] = []
        self._numbers = itertools.count(1)
        self._pause_until_s = 0.0

    def handlers(self, now_s: float) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Yield descriptors to poll, the events to poll for, and the function to call after an event."""
        if now_s >= self._pause_until_s:
            for door in self._doors:
                yield door.socket.fileno(), select.POLLIN, lambda door=door: self._accept(door)  # type: ignore[misc]
        for viewer in self._viewers:
            yield viewer.fileno(), viewer.events, viewer.serve

    def push(self, now_s: float, look: Callable[[], tuple[Seen, ...]], losses: Sequence[Loss] = ()) -> None:
        """Send a snapshot to each viewer in due time; disconnect viewers that have gone, are late, or are too many.

        Args:
            now_s: The time.
            look: Returns the states of the instances; called only if a viewer is due.
            losses: The lost instances and spares without which the job goes on.
        """
        if not self._viewers:
            return
        for viewer in self._too_many():
            viewer.refuse()
            self._part_from(viewer)
        due = [viewer for viewer in self._viewers if viewer.is_due(now_s)]
        if due:
            message = wire.pack(SEEN, self._snapshot(now_s, look(), losses).pack())
            for viewer in due:
                viewer.offer(message, now_s)
        for viewer in list(self._viewers):
            is_late = not viewer.is_welcome and now_s >= viewer.called_at_s + GREETING_LIMIT_S
            if is_late or not viewer.is_open:
                self._part_from(viewer)

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
        """Close all connections and doors at the end of the job."""
        for viewer in self._viewers:
            viewer.close()
        for door in self._doors:
            door.socket.close()
        self._viewers, self._doors = [], ()

    def _accept(self, door: Door) -> None:
        try:
            connection = door.socket.accept()[0]
        except BlockingIOError:
            return  # the caller is gone already
        except OSError:
            self._pause_until_s = self._now_s() + PAUSE_S
            return
        with suppress(OSError):
            if door.token or is_own(connection):
                self._viewers.append(Viewer(connection, door.token, self._now_s(), next(self._numbers)))
                return
        connection.close()

    def _part_from(self, viewer: Viewer) -> None:
        self._viewers.remove(viewer)
        viewer.close()

    def _too_many(self) -> list[Viewer]:
        """Return the viewers beyond `MOST_VIEWERS`: first the oldest strangers, then the newest known viewers."""
        there = [each for each in self._viewers if each.is_open]
        known = [each for each in there if each.is_welcome]
        strangers = [each for each in reversed(there) if not each.is_welcome]
        return [*known, *strangers][MOST_VIEWERS:]

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
