"""Messages between the ranks of one host, through memory that all of them see.

A sender copies what it sends into a pool of its own, once for all ranks that it is for, and tells each of them where it
lies; who receives it copies it to where it is needed. Pools are small and used again and again, so they stay in the
cache. Every word of the memory has one writer. Bells wake a rank that waits; the layout of the memory is at the end.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from collectives.point_to_point.link import EXCHANGE, LANES, PARTIALS, RESULTS, Link, Transfer
from collectives.shared_memory.segment import FENCE, LINE_BYTES

POOL_BYTES = {EXCHANGE: 1 << 18, PARTIALS: 1 << 20, RESULTS: 1 << 19}
"""What a rank may have on its way in each lane, to all others of its host together."""

FRAGMENT_BYTES = 1 << 16
"""Longer messages pass in parts of this size, so that they need not fit."""

QUEUED = 12
"""Fragments that may be on their way in a lane from one rank to another one."""

# Of each lane from one rank to another one, in 8-byte units. The sender writes how many fragments it has announced so
# far, and for the last ones where they lie, how long they are, and whether they end a message; the receiver, in a cache
# line of its own, how many it has taken.
ANNOUNCED, FRAGMENTS, TAKEN = 0, 1, 40
FRAGMENT_WORDS = 3
QUEUE_WORDS = 48

_WORD_BYTES = 8

_SYSTEM_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1

CAN_RING = _SYSTEM_CALL > 0
"""Whether this machine has bells; elsewhere waits have to poll."""


class NearLink(Link):
    """Ranks that share memory, numbered among themselves.

    Args:
        memory: at least `memory_bytes(size)` bytes, zeroed, the same for all ranks.
        rank: this rank.
        size: the number of ranks.
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
        self._expected: dict[_Inbox, None] = {}  # those in which something is waited for

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        return self._outboxes[lane].put(data, (to,))

    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        return [self._outboxes[lane].put(data, tuple(to))] * len(to)

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        inbox = self._inboxes.get((source, lane))
        if inbox is None:
            inbox = self._inboxes[source, lane] = _Inbox(self, source, lane)
        received = _Received(self, into)
        inbox.awaited.append(received)
        self._expected[inbox] = None
        return received

    def take(self) -> None:
        """Take whatever has come of that which is awaited: who asks for one message must not hold up another one."""
        for inbox in [inbox for inbox in self._expected if inbox.take()]:
            del self._expected[inbox]

    def channel(self, source: int, to: int, lane: int) -> memoryview:
        """Return the words of a lane from one rank to another one."""
        start = queue_start(self.size, source, to, lane)
        return self._words[start : start + QUEUE_WORDS]

    def pool(self, source: int, lane: int) -> np.ndarray:
        """Return the pool of a rank."""
        return np.frombuffer(self._memory, np.uint8, POOL_BYTES[lane], pool_start(self.size, source, lane))


class _Outgoing:
    """A message of which fragments may still have to be copied."""

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
    """A message of which fragments may still have to come."""

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
        """Copy one more fragment."""
        self.into[self.come : self.come + fragment.size] = fragment
        self.come += fragment.size
        if is_last:
            self.received = self.come
            self.is_whole = True


class _Outbox:
    """The messages that this rank sends in one lane: fragments lie in a pool until all receivers have taken them."""

    def __init__(self, link: NearLink, lane: int) -> None:
        self._bells = link.bells
        self._pool = link.pool(link.rank, lane)
        self._channels = [link.channel(link.rank, to, lane) for to in range(link.size)]
        self._announced = [0] * link.size
        self._waiting: deque[_Outgoing] = deque()
        self._lying: deque[tuple[int, Sequence[tuple[int, int]]]] = deque()  # ends; receivers, with their fragments
        self._begins = 0  # of what lies in the pool, counted in bytes from the very first one on
        self._ends = 0

    def put(self, data: np.ndarray, to: tuple[int, ...]) -> _Outgoing:
        """Send as much at once as there is room for."""
        sent = _Outgoing(self, data, to)
        self._waiting.append(sent)
        self.fill()
        return sent

    def fill(self) -> None:
        """Copy what waits, in its order, as far as there is room."""
        while self._waiting:
            sent = self._waiting[0]
            while sent.left:
                if not self._copy(sent, sent.left[0], len(sent.left) == 1):
                    return
                sent.left.popleft()
            self._waiting.popleft()

    def _copy(self, sent: _Outgoing, part: slice, is_last: bool) -> bool:
        """Return whether there was room for a fragment."""
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
        """Return the number of a receiver's fragments with this one."""
        channel, number = self._channels[to], self._announced[to]
        first = FRAGMENTS + number % QUEUED * FRAGMENT_WORDS
        channel[first], channel[first + 1], channel[first + 2] = facts
        if FENCE:
            FENCE()
        self._announced[to] = channel[ANNOUNCED] = number + 1
        return number + 1

    def _forget(self) -> None:
        """Free the room of fragments that all have taken."""
        while self._lying and all(self._channels[to][TAKEN] >= number for to, number in self._lying[0][1]):
            self._begins = self._lying.popleft()[0]

    def _room(self, nbytes: int) -> int:
        """Return where so many bytes lie in one part behind all others, counted as `_ends` is."""
        size = self._pool.size
        return self._ends if self._ends % size + nbytes <= size else -(-self._ends // size) * size


class _Inbox:
    """The messages that one rank sends to this one in one lane."""

    def __init__(self, link: NearLink, source: int, lane: int) -> None:
        self._source = source
        self._bells = link.bells
        self._pool = link.pool(source, lane)
        self._channel = link.channel(source, link.rank, lane)
        self._taken = 0
        self.awaited: deque[_Received] = deque()

    def take(self) -> bool:
        """Take all fragments that are there of messages that are awaited; whether none of these is left."""
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
                self._bells.ring(self._source)  # it may wait for room
        return not self.awaited


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bells:
    """Bells in shared memory, one for each rank: any rank rings one, only its owner waits for it.

    A ring that comes while its rank is awake ends the next wait at once. Of two that come at the same time one may be
    lost, with a wait that lasts as long as it was given.

    Args:
        memory: `LINE_BYTES` for each rank, so that no two bells share a cache line; zeroed, the same for all of them.
        rank: this rank.
    """

    def __init__(self, memory: memoryview, rank: int) -> None:
        self._call = ctypes.CDLL(None).syscall
        self._words = memory.cast("I")
        self._places = [ctypes.c_uint32.from_buffer(memory, start) for start in range(0, memory.nbytes, LINE_BYTES)]
        self._own = rank * (LINE_BYTES // 4)
        self._place = ctypes.byref(self._places[rank])
        self._heard = 0

    def ring(self, rank: int) -> None:
        """Wake a rank, after what it waits for has been written."""
        place = rank * (LINE_BYTES // 4)
        self._words[place] = (self._words[place] + 1) & 0xFFFFFFFF
        self._call(_SYSTEM_CALL, ctypes.byref(self._places[rank]), _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seconds: float) -> None:
        """Return when the bell of this rank has rung since the last wait, at the latest after so many seconds."""
        limit, heard = _Time(int(seconds), int(seconds % 1 * 1e9)), ctypes.c_uint32(self._heard)
        self._call(_SYSTEM_CALL, self._place, _WAIT, heard, ctypes.byref(limit), None, 0)  # whatever it returns
        self._heard = self._words[self._own]


def memory_bytes(size: int) -> int:
    """Return the memory that one channel between `size` ranks takes."""
    return pool_start(size, size, EXCHANGE)


def words_of(size: int) -> int:
    """Return how many words come before the pools."""
    return LANES * size * size * QUEUE_WORDS


def queue_start(size: int, source: int, to: int, lane: int) -> int:
    """Return where the words of a lane from one rank to another one begin."""
    return ((lane * size + source) * size + to) * QUEUE_WORDS


def bells_start(size: int) -> int:
    """Return where the bells of all ranks begin, in bytes: behind the words."""
    return words_of(size) * _WORD_BYTES


def pool_start(size: int, source: int, lane: int) -> int:
    """Return where the pool of a rank for a lane begins, in bytes."""
    before = sum(POOL_BYTES[each] for each in range(lane))
    return bells_start(size) + size * LINE_BYTES + source * sum(POOL_BYTES.values()) + before


def fragments(nbytes: int) -> Iterator[slice]:
    """Yield the parts in which so many bytes pass; one even where there are none."""
    for start in range(0, max(1, nbytes), FRAGMENT_BYTES):
        yield slice(start, min(nbytes, start + FRAGMENT_BYTES))
