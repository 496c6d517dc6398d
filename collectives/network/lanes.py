"""One-way lanes of messages between two workers, each on its own gRPC stream, so that no lane blocks another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np

HELD = 2  # received messages that are kept for a lane; further ones wait in the network
SMALL_BYTES = 1 << 17  # up to this size a message is copied at once, so that the sender need not wait


class Bell:
    """A signal to a single waiting thread; a binary semaphore."""

    def __init__(self) -> None:
        self._is_silent = threading.Lock()
        self._is_silent.acquire()

    def ring(self) -> None:
        """Signal an event; any thread may call it."""
        try:
            self._is_silent.release()
        except RuntimeError:
            return  # it is ringing already

    def wait(self, limit_s: float) -> None:
        """Wait until the bell rings, has rung since the last wait, or `limit_s` has passed."""
        self._is_silent.acquire(timeout=limit_s)


class Inbox:
    """The messages received on one lane from one worker and not taken yet.

    Args:
        bell: Bell to ring for every message.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._messages: deque[bytes] = deque()
        self._room = threading.Semaphore(HELD)
        self._is_closed = False

    def put(self, message: bytes) -> None:
        """Add a message; wait while too many messages have not been taken."""
        self._room.acquire()
        if self._is_closed:
            self._room.release()
            return
        self._messages.append(message)
        self._bell.ring()

    def take(self) -> bytes | None:
        """Return the next message, or None if none has arrived."""
        try:
            message = self._messages.popleft()
        except IndexError:
            return None
        self._room.release()
        return message

    def close(self) -> None:
        """Drop the present and all future messages."""
        self._is_closed = True
        self._messages.clear()
        self._room.release(HELD)


class Received:
    """An expected message on a lane. Lanes keep their order, so poll earlier messages first.

    Args:
        inbox: Inbox of the lane.
        into: Memory for the message.
        complain: Function to call with the reason if the message does not fit.
    """

    __slots__ = ("_complain", "_inbox", "_into", "_is_done", "received")

    def __init__(self, inbox: Inbox, into: np.ndarray, complain: Callable[[str], None]) -> None:
        self.received = 0
        self._inbox = inbox
        self._into = into
        self._complain = complain
        self._is_done = False

    def done(self) -> bool:
        """Return whether the message is in `into`."""
        if self._is_done:
            return True
        message = self._inbox.take()
        if message is None:
            return False
        if len(message) > self._into.size:
            self._complain(f"it sent {len(message)} bytes, but {self._into.size} at most were expected")
            return False
        self._into[: len(message)] = np.frombuffer(message, np.uint8)
        self.received = len(message)
        self._is_done = True
        return True


class Fetched:
    """An expected message on a lane that stays in gRPC's memory.

    Args:
        inbox: Inbox of the lane.
        size: Required size in bytes.
        complain: Function to call with the reason if the size differs.
    """

    __slots__ = ("_complain", "_inbox", "_size", "message")
    received = None

    def __init__(self, inbox: Inbox, size: int, complain: Callable[[str], None]) -> None:
        self._inbox = inbox
        self._size = size
        self._complain = complain
        self.message = np.empty(0, np.uint8)

    def done(self) -> bool:
        """Return whether the message has arrived."""
        if self.message.size:
            return True
        message = self._inbox.take()
        if message is None:
            return False
        if len(message) != self._size:
            self._complain(f"it sent {len(message)} bytes, but {self._size} were expected")
            return False
        self.message = np.frombuffer(message, np.uint8)
        return True


class Sent:
    """A message to send; done as soon as it has been copied."""

    __slots__ = ("_data", "_is_done")
    received = None

    def __init__(self, data: np.ndarray) -> None:
        self._is_done = data.size <= SMALL_BYTES
        self._data: np.ndarray | bytes = data.tobytes() if self._is_done else data

    def done(self) -> bool:
        """Return whether the array may be reused."""
        return self._is_done

    def take(self) -> bytes:
        """Return the message as bytes for gRPC."""
        data = self._data
        if isinstance(data, bytes):
            return data
        message = data.tobytes()
        self._data = b""
        self._is_done = True
        return message


class Outbox:
    """The messages to send on one lane to one worker, as an iterator that waits for the next message.

    gRPC requests a message after it has taken the previous one, so messages that the network cannot take yet stay here.

    Args:
        bell: Bell to ring whenever a sent array may be reused.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._queue: SimpleQueue[Sent | None] = SimpleQueue()

    def put(self, sent: Sent) -> None:
        """Append a message."""
        self._queue.put(sent)

    def end(self) -> None:
        """Note that no further messages will follow."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (sent := self._queue.get()) is not None:
            was_done = sent.done()
            message = sent.take()
            if not was_done:
                self._bell.ring()
            yield message
