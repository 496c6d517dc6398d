"""What lies where in a shared window, and the words by which its ranks keep in step."""

from __future__ import annotations

INLINE_BYTES = 1 << 17  # per rank: what travels with an exchange; the ranks divide it
PIPE_BYTES = 1 << 20  # per rank: contributions on their way to the ranks that reduce them
RESULT_BYTES = 1 << 19  # per rank: finished chunks on their way to the other ranks
DEPTH = 2  # chunks that may be under way at once
LINE_BYTES = 64

# The words of a rank, in 8-byte units: one writer, many readers. Those of an exchange exist twice, by parity; the
# others say behind which chunk the rank stands, and only grow.
SEQUENCE, FINGERPRINT, COUNT, NBYTES = 0, 2, 4, 6
PRODUCED, CONSUMED, REDUCED, FETCHED = 8, 9, 10, 11
WORDS = 16


def channel_bytes(size: int) -> int:
    """The memory that one channel between `size` ranks takes."""
    return pipe_start(size, size)


def inline_start(size: int, rank: int, parity: int) -> int:
    """Where a rank's contributions to an exchange begin."""
    return size * WORDS * 8 + (rank * 2 + parity) * INLINE_BYTES


def pipe_start(size: int, rank: int) -> int:
    """Where the pipe of a rank begins; its results follow."""
    return inline_start(size, size, 0) + rank * (PIPE_BYTES + RESULT_BYTES)
