"""poprun's end of the connections to those who look at its job: none of them can hold the job up.

What a viewer has not read yet is one snapshot at most; there is a new one for it when it has read that. Nothing here
waits, and what comes from viewers is an answer to a challenge, or the end of the connection.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from poprun.ipc import wire
from poprun.ipc.sockets import is_own
from poprun.monitor.doors import ANSWER, CHALLENGE, FULL, RANDOM_BYTES, SEEN, Door, welcome_to
from poprun.monitor.snapshot import Seen, Snapshot

INTERVAL_S = 1.0
"""The interval between snapshots."""
GREETING_LIMIT_S = 5.0
"""The time in which a viewer has to prove that it knows the token."""
UNREAD_LIMIT_S = 30.0
"""The time in which a viewer has to read a snapshot."""
MOST_VIEWERS = 16
PAUSE_S = 1.0
"""The pause between calls after descriptors have run out."""
_READ_BYTES = 1024
_SEND_BYTES = 1 << 16


class Viewer:
    """One connection; it gets snapshots once it has proved that it knows `token`, if there is one.

    Attributes:
        is_open: whether it is to be kept.
        is_welcome: whether it gets snapshots.
        called_at_s: when it has called.
    """

    def __init__(self, connection: socket.socket, token: str, now_s: float) -> None:
        self.is_open = True
        self.is_welcome = not token
        self.called_at_s = self._read_at_s = now_s
        self._next_s = now_s
        self._connection = connection
        self._token = token
        self._reader = wire.MessageReader(wire.MOST_OF_STRANGERS)
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
        """Take what it says, and send what it takes."""
        self._receive()
        self._send()

    def is_due(self, now_s: float) -> bool:
        """Return whether the viewer may get a snapshot; give it up if it has not read the last one for long."""
        if self._unsent:
            self.is_open = self.is_open and now_s < self._read_at_s + UNREAD_LIMIT_S
            return False
        self._read_at_s = now_s
        return self.is_open and self.is_welcome and now_s >= self._next_s

    def offer(self, message: bytes, now_s: float) -> None:
        """Send a snapshot."""
        self._next_s = now_s + INTERVAL_S
        self._unsent += message
        self._send()

    def refuse(self) -> None:
        """Say that there are too many viewers."""
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
        if not data or self.is_welcome:  # it has gone, or says something where there is nothing to say
            self.is_open = False
            return
        try:
            messages = self._reader.feed(data)
        except ValueError:
            self.is_open = False
            return
        for kind, content in messages[:1]:
            welcome = welcome_to(self._token, self._challenge, content) if kind == ANSWER else None
            self.is_open = self.is_welcome = welcome is not None and len(messages) == 1
            self._unsent += welcome or b""

    def _send(self) -> None:
        try:
            while self._unsent and self.is_open:
                del self._unsent[: self._connection.send(self._unsent[:_SEND_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False


class Viewers:
    """All viewers of a job, through all attempts at it.

    Args:
        doors: where they call; none: nobody can look.
        program: the words of the program.
        now_s: the clock.

    Attributes:
        attempt: how often the job has been started again.
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
        self._pause_until_s = 0.0

    def handlers(self, now_s: float) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Descriptors, what to poll them for, and what to call then."""
        if now_s >= self._pause_until_s:
            for door in self._doors:
                yield door.socket.fileno(), select.POLLIN, lambda door=door: self._accept(door)  # type: ignore[misc]
        for viewer in self._viewers:
            yield viewer.fileno(), viewer.events, viewer.serve

    def push(self, now_s: float, look: Callable[[], tuple[Seen, ...]], losses: int = 0) -> None:
        """Give those a snapshot who are due; part from those who have gone, or do not behave.

        Args:
            now_s: the time.
            look: says what the instances do; called only where somebody wants to know.
            losses: without how many instances the job goes on.
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

    def pause(self, seconds: float) -> None:
        """Wait for so long, between two attempts; whoever looks sees that there are no instances."""
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
            return  # who has called is gone already
        except OSError:
            self._pause_until_s = self._now_s() + PAUSE_S
            return
        with suppress(OSError):
            if door.token or is_own(connection):
                self._viewers.append(Viewer(connection, door.token, self._now_s()))
                return
        connection.close()

    def _part_from(self, viewer: Viewer) -> None:
        self._viewers.remove(viewer)
        viewer.close()

    def _too_many(self) -> list[Viewer]:
        """Return whoever is one too many: strangers who called first, then the last of the others."""
        there = [each for each in self._viewers if each.is_open]
        known = [each for each in there if each.is_welcome]
        strangers = [each for each in reversed(there) if not each.is_welcome]
        return [*known, *strangers][MOST_VIEWERS:]

    def _snapshot(self, now_s: float, instances: tuple[Seen, ...], losses: int) -> Snapshot:
        age_s = now_s - self._began_s
        return Snapshot(os.getpid(), os.uname().nodename, self._program, age_s, self.attempt, losses, instances)
