"""Messages between the ranks of one host through shared memory.

A sender copies a message once, into its own pool, for all receivers, and announces its place to each receiver. A
receiver copies it to its destination. Pools are small and reused, so they stay in the cache. Every word of the shared
memory has a single writer. Bells wake waiting ranks. The functions at the end define the memory layout.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import override

from collectives.point_to_point.link import EXCHANGE, LANES, PARTIALS, RESULTS, Link, Transfer
from collectives.shared_memory.segment import FENCE, LINE_BYTES

POOL_BYTES = {EXCHANGE: 1 << 18, PARTIALS: 1 << 20, RESULTS: 1 << 19}
"""Size of each lane's pool: the bytes that a rank may have in transit to all other ranks of its host together."""

FRAGMENT_BYTES = 1 << 16
"""Largest fragment. Longer messages are sent in fragments, so that they need not fit into the pool."""

QUEUED = 12
"""Maximum number of fragments in transit on a lane from one rank to another."""

# The words of a lane from one rank to another, in 8-byte units. The sender writes the number of fragments that it has
# announced; for each of the latest fragments it writes the place, the length, and whether it ends a message. The
# receiver writes the number of fragments that it has taken, in a cache line of its own.
ANNOUNCED, FRAGMENTS, TAKEN = 0, 1, 40
FRAGMENT_WORDS = 3
QUEUE_WORDS = 48

_WORD_BYTES = 8

_SYSTEM_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1

CAN_RING = _SYSTEM_CALL > 0
"""Whether bells (Linux futexes) work on this machine; without bells waits have to poll."""


class NearLink(Link):
    """A link between ranks that share memory, numbered among themselves.

    Args:
        memory: Zeroed memory of at least `memory_bytes(size)` bytes, shared by all ranks.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._memory = memory
        self._words = memory[: 8 * words_of(size)].cast("Q")
        bells = memory[bells_start(size) : bells_start(size) + size * LINE_BYTES]
        self.bells = Bells(bells, rank) if CAN_RING else None
        self.pause = self.bells.wait if self.bells else None
        self._outboxes = [_Outbox(self, lane) for lane in range(LANES)]
        self._inboxes: dict[tuple[int, int], _Inbox] = {}
        self._expected: dict[_Inbox, None] = {}  # inboxes with an awaited message

    @override
    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        return self._outboxes[lane].put(data, (to,))

    @override
    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        return [self._outboxes[lane].put(data, tuple(to))] * len(to)

    @override
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        inbox = self._inboxes.get((source, lane))
        if inbox is None:
            inbox = self._inboxes[source, lane] = _Inbox(self, source, lane)
        received = _Received(self, into)
        inbox.awaited.append(received)
        self._expected[inbox] = None
        return received

    def take(self) -> None:
        """Take all arrived fragments of awaited messages: waiting for one message must not delay another one."""
        for inbox in [inbox for inbox in self._expected if inbox.take()]:
            del self._expected[inbox]

    def channel(self, source: int, to: int, lane: int) -> memoryview:
        """Return the words of a lane from rank `source` to rank `to`."""
        start = queue_start(self.size, source, to, lane)
        return self._words[start : start + QUEUE_WORDS]

    def pool(self, source: int, lane: int) -> np.ndarray:
        """Return the pool of rank `source` for a lane."""
        return np.frombuffer(self._memory, np.uint8, POOL_BYTES[lane], pool_start(self.size, source, lane))


class _Outgoing:
    """A message with fragments that may not be copied yet."""

    __slots__ = ("_outbox", "data", "left", "to")
    received = None

    def __init__(self, outbox: _Outbox, data: np.ndarray, to: tuple[int, ...]) -> None:
        self._outbox = outbox
        self.data = data
        self.to = to
        self.left = deque(fragments(data.size))

    def done(self) -> bool:
        if self.left:
            self._outbox.fill()
        return not self.left


class _Received:
    """A message with fragments that may not have arrived yet."""

    __slots__ = ("_link", "come", "into", "is_whole", "received")

    def __init__(self, link: NearLink, into: np.ndarray) -> None:
        self._link = link
        self.into = into
        self.come = 0
        self.is_whole = False
        self.received: int | None = None

    def done(self) -> bool:
        if not self.is_whole:
            self._link.take()
        return self.is_whole

    def add(self, fragment: np.ndarray, is_last: bool) -> None:
        """Append a fragment to the message."""
        self.into[self.come : self.come + fragment.size] = fragment
        self.come += fragment.size
        if is_last:
            self.received = self.come
            self.is_whole = True


class _Outbox:
    """The messages that this rank sends on one lane. Fragments stay in the pool until all receivers have taken them."""

    def __init__(self, link: NearLink, lane: int) -> None:
        self._bells = link.bells
        self._pool = link.pool(link.rank, lane)
        self._channels = [link.channel(link.rank, to, lane) for to in range(link.size)]
        self._announced = [0] * link.size
        self._waiting: deque[_Outgoing] = deque()
        self._lying: deque[tuple[int, Sequence[tuple[int, int]]]] = deque()  # ends; receivers with fragment numbers
        self._begins = 0  # start of the pool's used part, as a running byte count since the first fragment
        self._ends = 0

    def put(self, data: np.ndarray, to: tuple[int, ...]) -> _Outgoing:
        """Send as much of the message as there is room for."""
        sent = _Outgoing(self, data, to)
        self._waiting.append(sent)
        self.fill()
        return sent

    def fill(self) -> None:
        """Copy waiting messages into the pool in their order, as far as there is room."""
        while self._waiting:
            sent = self._waiting[0]
            while sent.left:
                if not self._copy(sent, sent.left[0], len(sent.left) == 1):
                    return
                sent.left.popleft()
            self._waiting.popleft()

    def _copy(self, sent: _Outgoing, part: slice, is_last: bool) -> bool:
        """Copy a fragment into the pool and announce it; return whether there was room."""
        nbytes = part.stop - part.start
        if any(self._announced[to] - self._channels[to][TAKEN] >= QUEUED for to in sent.to):
            return False
        self._forget()
        start = self._room(nbytes)
        if not self._lying:
            self._begins = start
        elif start + _aligned(nbytes) - self._begins > self._pool.size:
            return False
        place = start % self._pool.size
        self._pool[place : place + nbytes] = sent.data[part]
        if FENCE:
            FENCE()
        receivers = [(to, self._announce(to, (place, nbytes, is_last))) for to in sent.to]
        self._ends = start + _aligned(nbytes)
        self._lying.append((self._ends, receivers))
        self._ring(sent.to)
        return True

    def _ring(self, to: Sequence[int]) -> None:
        if self._bells is not None:
            for rank in to:
                self._bells.ring(rank)

    def _announce(self, to: int, facts: tuple[int, int, bool]) -> int:
        """Announce a fragment to a receiver; return the number of fragments announced to it."""
        channel, number = self._channels[to], self._announced[to]
        first = FRAGMENTS + number % QUEUED * FRAGMENT_WORDS
        channel[first], channel[first + 1], channel[first + 2] = facts
        if FENCE:
            FENCE()
        self._announced[to] = channel[ANNOUNCED] = number + 1
        return number + 1

    def _forget(self) -> None:
        """Free the room of fragments that all receivers have taken."""
        while self._lying and all(self._channels[to][TAKEN] >= number for to, number in self._lying[0][1]):
            self._begins = self._lying.popleft()[0]

    def _room(self, nbytes: int) -> int:
        """Return the start of `nbytes` contiguous bytes behind all fragments, as a running byte count like `_ends`."""
        size = self._pool.size
        return self._ends if self._ends % size + nbytes <= size else -(-self._ends // size) * size


class _Inbox:
    """The messages that one rank sends to this rank on one lane."""

    def __init__(self, link: NearLink, source: int, lane: int) -> None:
        self._source = source
        self._bells = link.bells
        self._pool = link.pool(source, lane)
        self._channel = link.channel(source, link.rank, lane)
        self._taken = 0
        self.awaited: deque[_Received] = deque()

    def take(self) -> bool:
        """Take all arrived fragments of awaited messages; return whether no awaited message is left."""
        while self.awaited and self._channel[ANNOUNCED] > self._taken:
            if FENCE:
                FENCE()
            message = self.awaited[0]
            first = FRAGMENTS + self._taken % QUEUED * FRAGMENT_WORDS
            place, nbytes, is_last = self._channel[first : first + FRAGMENT_WORDS]
            message.add(self._pool[place : place + nbytes], bool(is_last))
            if FENCE:
                FENCE()
            self._taken += 1
            self._channel[TAKEN] = self._taken
            if message.is_whole:
                self.awaited.popleft()
            if self._bells is not None and nbytes > FRAGMENT_BYTES // 2:
                self._bells.ring(self._source)  # the sender may wait for room
        return not self.awaited


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bells:
    """Bells in shared memory, one per rank, built on Linux futexes (futex(2)). Any rank rings, only the owner waits.

    A ring while the owner is awake ends the owner's next wait at once. Of two simultaneous rings one may be lost; then
    the wait lasts for its full time.

    Args:
        memory: Zeroed shared memory with `LINE_BYTES` per rank, so that no two bells share a cache line.
        rank: This rank.
    """

    def __init__(self, memory: memoryview, rank: int) -> None:
        self._call = ctypes.CDLL(None).syscall
        self._words = memory.cast("I")
        self._places = [ctypes.c_uint32.from_buffer(memory, start) for start in range(0, memory.nbytes, LINE_BYTES)]
        self._own = rank * (LINE_BYTES // 4)
        self._place = ctypes.byref(self._places[rank])
        self._heard = 0

    def ring(self, rank: int) -> None:
        """Wake a rank. Write the data for which it waits first."""
        place = rank * (LINE_BYTES // 4)
        self._words[place] = (self._words[place] + 1) & 0xFFFFFFFF
        self._call(_SYSTEM_CALL, ctypes.byref(self._places[rank]), _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seconds: float) -> None:
        """Wait until the bell of this rank has rung since the last wait, or `seconds` have passed."""
        limit, heard = _Time(int(seconds), int(seconds % 1 * 1e9)), ctypes.c_uint32(self._heard)
        self._call(_SYSTEM_CALL, self._place, _WAIT, heard, ctypes.byref(limit), None, 0)  # every result ends the wait
        self._heard = self._words[self._own]


def memory_bytes(size: int) -> int:
    """Return the size of the memory of one channel between `size` ranks."""
    return pool_start(size, size, EXCHANGE)


def words_of(size: int) -> int:
    """Return the number of words before the bells and pools."""
    return LANES * size * size * QUEUE_WORDS


def queue_start(size: int, source: int, to: int, lane: int) -> int:
    """Return the index of the first word of a lane from rank `source` to rank `to`."""
    return ((lane * size + source) * size + to) * QUEUE_WORDS


def bells_start(size: int) -> int:
    """Return the byte offset of the bells, which follow the words."""
    return words_of(size) * _WORD_BYTES


def pool_start(size: int, source: int, lane: int) -> int:
    """Return the byte offset of the pool of a rank for a lane."""
    before = sum(POOL_BYTES[each] for each in range(lane))
    return bells_start(size) + size * LINE_BYTES + source * sum(POOL_BYTES.values()) + before


def fragments(nbytes: int) -> Iterator[slice]:
    """Yield the fragments of a message of `nbytes` bytes; an empty message has one fragment."""
    for start in range(0, max(1, nbytes), FRAGMENT_BYTES):
        yield slice(start, min(nbytes, start + FRAGMENT_BYTES))
