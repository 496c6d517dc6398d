"""One-way lanes of messages between two workers, each in a gRPC stream of its own so that none blocks another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np

HELD = 2  # messages that wait for their receiver; more wait in the network
SMALL_BYTES = 1 << 17  # copied at once, so that the sender need not wait


class Bell:
    """Wakes the one thread that waits for something to happen."""

    def __init__(self) -> None:
        self._is_silent = threading.Lock()
        self._is_silent.acquire()

    def ring(self) -> None:
        """Something has happened; may be called from any thread."""
        try:
            self._is_silent.release()
        except RuntimeError:
            return  # it rings already

    def wait(self, limit_s: float) -> None:
        """Return when the bell rings, or has rung since the last time, at the latest after `limit_s`."""
        self._is_silent.acquire(timeout=limit_s)


class Inbox:
    """Messages that have come on one lane from one worker and were not taken yet.

    Args:
        bell: rung for every message.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._messages: deque[bytes] = deque()
        self._room = threading.Semaphore(HELD)
        self._is_closed = False

    def put(self, message: bytes) -> None:
        """Add a message; waits while too many have not been taken."""
        self._room.acquire()
        if self._is_closed:
            self._room.release()
            return
        self._messages.append(message)
        self._bell.ring()

    def take(self) -> bytes | None:
        """Return the next message, if it has come."""
        try:
            message = self._messages.popleft()
        except IndexError:
            return None
        self._room.release()
        return message

    def close(self) -> None:
        """Forget the messages, and those that will come."""
        self._is_closed = True
        self._messages.clear()
        self._room.release(HELD)


class Received:
    """A message that is expected on a lane; lanes keep their order, so ask the first one first.

    Args:
        inbox: where it will be.
        into: memory for it.
        complain: told what is wrong with a message that does not fit.
    """

    __slots__ = ("_complain", "_inbox", "_into", "_is_done", "received")

    def __init__(self, inbox: Inbox, into: np.ndarray, complain: Callable[[str], None]) -> None:
        self.received = 0
        self._inbox = inbox
        self._into = into
        self._complain = complain
        self._is_done = False

    def done(self) -> bool:
        """Return whether the message is in its place."""
        if self._is_done:
            return True
        message = self._inbox.take()
        if message is None:
            return False
        if len(message) > self._into.size:
            self._complain(f"it sent {len(message)} bytes where {self._into.size} at most were expected")
            return False
        self._into[: len(message)] = np.frombuffer(message, np.uint8)
        self.received = len(message)
        self._is_done = True
        return True


class Fetched:
    """A message that is expected on a lane and stays where gRPC has put it.

    Args:
        inbox: where it will be.
        size: how many bytes it must have.
        complain: told what is wrong with a message that has not.
    """

    __slots__ = ("_complain", "_inbox", "_size", "message")
    received = None

    def __init__(self, inbox: Inbox, size: int, complain: Callable[[str], None]) -> None:
        self._inbox = inbox
        self._size = size
        self._complain = complain
        self.message = np.empty(0, np.uint8)

    def done(self) -> bool:
        """Return whether it has come."""
        if self.message.size:
            return True
        message = self._inbox.take()
        if message is None:
            return False
        if len(message) != self._size:
            self._complain(f"it sent {len(message)} bytes where {self._size} were expected")
            return False
        self.message = np.frombuffer(message, np.uint8)
        return True


class Sent:
    """A message on its way; done as soon as it has been copied."""

    __slots__ = ("_data", "_is_done")
    received = None

    def __init__(self, data: np.ndarray) -> None:
        self._is_done = data.size <= SMALL_BYTES
        self._data: np.ndarray | bytes = data.tobytes() if self._is_done else data

    def done(self) -> bool:
        """Return whether the array may be used again."""
        return self._is_done

    def take(self) -> bytes:
        """Return the message as gRPC wants it."""
        data = self._data
        if isinstance(data, bytes):
            return data
        message = data.tobytes()
        self._data = b""
        self._is_done = True
        return message


class Outbox:
    """Messages to send on one lane to one worker; iterating over it waits for the next one.

    gRPC asks for a message when it has taken the one before, so those that the network cannot take yet stay here.

    Args:
        bell: rung whenever a sent array may be used again.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._queue: SimpleQueue[Sent | None] = SimpleQueue()

    def put(self, sent: Sent) -> None:
        """Send it after all the others."""
        self._queue.put(sent)

    def end(self) -> None:
        """Note that nothing more will follow."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (sent := self._queue.get()) is not None:
            was_done = sent.done()
            message = sent.take()
            if not was_done:
                self._bell.ring()
            yield message
