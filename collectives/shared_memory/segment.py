"""Memory that several processes of one host share, and the words in it by which they tell each other how far they are.

A segment is a file in /dev/shm, mapped by all and unlinked at once.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from collectives.agreement import exchange_bytes
from collectives.transport import Transport
from collectives.waiting import Watch

logger = logging.getLogger(__name__)

SHARED_MEMORY_DIR = Path("/dev/shm")

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


def create_segment(nbytes: int, directory: Path = SHARED_MEMORY_DIR) -> tuple[mmap.mmap, Path]:
    """Make a segment, filled with zeros, whose memory is reserved for good.

    The caller hands the path to the other processes, waits until they have mapped it, and unlinks it; the memory
    then lives until the last mapping goes, whatever happens to the processes.

    Raises:
        OSError: where the directory is missing or too small (nothing stays behind).
    """
    path = directory / f"popdist-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Without the reservation a full file system shows up only as SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes), path
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def open_segment(path: Path, nbytes: int) -> mmap.mmap:
    """Map a segment that another process of this host has made.

    Raises:
        OSError: where the file is not there: the other process lives on another host or in another container.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def share_segment(
    transport: Transport, nbytes: int, directory: Path = SHARED_MEMORY_DIR, hosts: Sequence[int] = ()
) -> mmap.mmap | None:
    """Make one segment for all ranks of `transport`, or one for each host; a collective call.

    Args:
        transport: between the ranks.
        nbytes: the size of this rank's segment.
        directory: where it is made.
        hosts: the number of the host of each rank; default: all are on one.

    Returns:
        The segment, or `None` on all ranks where one of them cannot have it.
    """
    segment: mmap.mmap | None = None
    path: Path | None = None
    leader = hosts.index(hosts[transport.rank]) if hosts else 0
    if transport.rank == leader:
        try:
            segment, path = create_segment(nbytes, directory)
        except OSError as error:
            logger.info("no shared memory of %d bytes in %s: %s", nbytes, directory, error)
    try:
        announced = exchange_bytes(transport, os.fsencode(path) if path else b"")[leader]
        if segment is None and announced:
            try:
                segment = open_segment(Path(os.fsdecode(announced)), nbytes)
            except OSError as error:
                logger.info("shared memory %s cannot be mapped: %s", announced, error)
        everybody_has_it = all(exchange_bytes(transport, b"yes" if segment else b""))
    finally:
        if path:
            path.unlink()
    return segment if everybody_has_it else None


def _make_fence() -> Callable[[], None] | None:
    """Return what keeps a processor from reordering stores around a flag; nothing on x86, which does not."""
    if platform.machine() in ("x86_64", "AMD64", "i686"):
        return None
    lock = threading.Lock()

    def fence() -> None:  # an atomic read-modify-write with acquire, then one with release semantics
        with lock:
            pass

    return fence


FENCE = _make_fence()


class Window:
    """The shared memory of one channel, as one rank uses it.

    Args:
        memory: at least `channel_bytes(size)` bytes, zeroed, the same for all ranks.
        rank: this rank.
        size: the number of ranks.
        watch: how to wait.

    Attributes:
        words: those of all ranks.
        mine: where this rank's words begin.
        others: where those of the other ranks begin.
        chunks: how many chunks have gone through the window so far.
    """

    def __init__(self, memory: memoryview, rank: int, size: int, watch: Watch) -> None:
        self.memory = memory
        self.rank = rank
        self.size = size
        self.words = memory[: size * WORDS * 8].cast("Q")
        self.mine = rank * WORDS
        self.others = [other * WORDS for other in range(size) if other != rank]
        self.chunks = 0
        self._watch = watch

    def announce(self, word: int, value: int) -> None:
        """Give one of the own words a value, behind everything that was written before."""
        if FENCE:
            FENCE()
        self.words[self.mine + word] = value

    def await_all(self, word: int, value: int) -> None:
        """Wait until the given word of every other rank has reached `value`."""
        words = self.words
        for other in self.others:
            if words[other + word] < value:
                self.spin(other + word, value, lambda: self.behind(word, value))
        if FENCE:
            FENCE()

    def await_rank(self, rank: int, word: int, value: int) -> None:
        """Wait until the given word of a rank has reached `value`."""
        index = rank * WORDS + word
        if self.words[index] < value:
            self.spin(index, value, lambda: [rank])
        if FENCE:
            FENCE()

    def spin(self, index: int, value: int, missing: Callable[[], Sequence[int]]) -> None:
        """Wait until the word at an index has reached `value`; `missing` says whom that is about."""
        words = self.words
        for _ in range(self._watch.spins):
            if words[index] >= value:
                return
        self._watch.wait_patiently(lambda: words[index] >= value, missing)

    def behind(self, word: int, value: int) -> list[int]:
        """Return the other ranks whose word has not reached `value`."""
        return [other // WORDS for other in self.others if self.words[other + word] < value]

    def catch_up(self) -> None:
        """Put all the words of this rank behind the last chunk."""
        if FENCE:
            FENCE()
        words, mine, chunks = self.words, self.mine, self.chunks
        words[mine + PRODUCED] = chunks
        words[mine + CONSUMED] = chunks
        words[mine + FETCHED] = chunks
        words[mine + REDUCED] = chunks

    def close(self) -> None:
        """Let the memory go."""
        self.words.release()


def channel_bytes(size: int) -> int:
    """Return the memory that one channel between `size` ranks takes."""
    return pipe_start(size, size)


def inline_start(size: int, rank: int, parity: int) -> int:
    """Return where a rank's contributions to an exchange begin."""
    return size * WORDS * 8 + (rank * 2 + parity) * INLINE_BYTES


def pipe_start(size: int, rank: int) -> int:
    """Return where the pipe of a rank begins; its results follow."""
    return inline_start(size, size, 0) + rank * (PIPE_BYTES + RESULT_BYTES)
