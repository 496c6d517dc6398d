"""What lies where in the memory through which the ranks of a host give each other messages."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.hosts.bell import LINE_BYTES
from collectives.point_to_point.link import EXCHANGE, LANES, PARTIALS, RESULTS

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


def memory_bytes(size: int) -> int:
    """The memory that one channel between `size` ranks takes."""
    return pool_start(size, size, EXCHANGE)


def words_of(size: int) -> int:
    """How many words come before the pools."""
    return LANES * size * size * QUEUE_WORDS


def queue_start(size: int, source: int, to: int, lane: int) -> int:
    """Where the words of a lane from one rank to another one begin."""
    return ((lane * size + source) * size + to) * QUEUE_WORDS


def bells_start(size: int) -> int:
    """Where the bells of all ranks begin, in bytes: behind the words."""
    return words_of(size) * _WORD_BYTES


def pool_start(size: int, source: int, lane: int) -> int:
    """Where the pool of a rank for a lane begins, in bytes."""
    before = sum(POOL_BYTES[each] for each in range(lane))
    return bells_start(size) + size * LINE_BYTES + source * sum(POOL_BYTES.values()) + before


def fragments(nbytes: int) -> Iterator[slice]:
    """The parts in which so many bytes pass; one even where there are none."""
    for start in range(0, max(1, nbytes), FRAGMENT_BYTES):
        yield slice(start, min(nbytes, start + FRAGMENT_BYTES))
