"""One-way lanes of messages between two workers, each on its own gRPC stream, so that no lane blocks another."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np

HELD = 2  # received messages that are kept for a lane; further ones wait in the network
SMALL_BYTES = 1 << 17  # up to this size an array is copied at once, so that the sender need not wait
_ROOM_LIMIT_S = 1.0  # interval at which a lane looks whether it was closed


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
        self._has_room = Bell()
        self._is_awaited = False  # whether `await_room` waits
        self._is_closed = False

    def put(self, message: bytes) -> None:
        """Add a message without waiting; call `await_room` before the next one is requested."""
        if not self._is_closed:
            self._messages.append(message)
            self._bell.ring()

    def await_room(self) -> None:
        """Wait while too many messages have not been taken."""
        self._is_awaited = True  # before the messages are counted: `take` may come in between
        while len(self._messages) > HELD and not self._is_closed:
            self._has_room.wait(_ROOM_LIMIT_S)
        self._is_awaited = False

    def take(self) -> bytes | None:
        """Return the next message, or None if none has arrived."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        if self._is_awaited:
            self._has_room.ring()
        return message

    def put_back(self, message: bytes) -> None:
        """Let a message that was taken be the next one again."""
        self._messages.appendleft(message)

    def __len__(self) -> int:
        return len(self._messages)

    def close(self) -> None:
        """Drop the present and all future messages."""
        self._is_closed = True
        self._messages.clear()
        self._has_room.ring()


class _Expected(ABC):
    """An expected message on a lane. Lanes keep their order, so poll earlier ones first.

    Args:
        inbox: Inbox of the lane.
        least: Smallest size in bytes.
        most: Largest size in bytes.
        complain: Function to call with the reason if the message does not fit.
    """

    __slots__ = ("_complain", "_inbox", "_least", "_most", "received")

    def __init__(self, inbox: Inbox, least: int, most: int, complain: Callable[[str], None]) -> None:
        self._inbox, self._least, self._most, self._complain = inbox, least, most, complain
        self.received: int | None = None

    def done(self) -> bool:
        """Return whether the message has arrived."""
        if self.received is not None:
            return True
        message = self._inbox.take()
        if message is None:
            return False
        if not self._least <= len(message) <= self._most:
            at_most = "" if self._least == self._most else " at most"
            self._complain(f"it sent {len(message)} bytes, but {self._most}{at_most} were expected")
            return False
        self._keep(np.frombuffer(message, np.uint8))
        self.received = len(message)
        return True

    @abstractmethod
    def _keep(self, message: np.ndarray) -> None:
        """Take the message, which fits."""


class Fetched(_Expected):
    """An expected message that stays in gRPC's memory, as `message`."""

    __slots__ = ("message",)

    def _keep(self, message: np.ndarray) -> None:
        self.message = message


class Received(_Expected):
    """An expected message that is copied to the beginning of `into`."""

    __slots__ = ("_into",)

    def __init__(self, inbox: Inbox, into: np.ndarray, complain: Callable[[str], None]) -> None:
        super().__init__(inbox, 0, into.size, complain)
        self._into = into

    def _keep(self, message: np.ndarray) -> None:
        self._into[: message.size] = message


class CopiedMessage:
    """A sent message whose array may be reused from the beginning."""

    __slots__ = ()
    received = None

    def done(self) -> bool:
        """Return True."""
        return True


class Sent:
    """A large message to send, which is copied when gRPC takes it: otherwise it would be in memory twice."""

    __slots__ = ("_data",)
    received = None

    def __init__(self, data: np.ndarray) -> None:
        self._data: np.ndarray | None = data

    def done(self) -> bool:
        """Return whether the array may be reused."""
        return self._data is None

    def take(self) -> bytes:
        """Return the message as bytes for gRPC."""
        assert self._data is not None
        message = self._data.tobytes()
        self._data = None
        return message


class Outbox:
    """The messages to send on one lane to one worker, as an iterator that waits for the next message.

    gRPC requests a message after it has taken the previous one, so messages that the network cannot take yet stay here.

    Args:
        bell: Bell to ring whenever a sent array may be reused.

    Attributes:
        put: Function that appends a message.
        is_dropped: Whether nobody needs the messages any more.
    """

    def __init__(self, bell: Bell) -> None:
        self.is_dropped = False
        self._bell = bell
        self._queue: SimpleQueue[bytes | Sent | None] = SimpleQueue()
        self.put: Callable[[bytes | Sent], None] = self._queue.put

    def end(self) -> None:
        """Note that no further messages will follow."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._queue.get()) is not None:
            if isinstance(message, Sent):
                message = message.take()
                self._bell.ring()
            yield message
