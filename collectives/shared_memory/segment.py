"""Shared memory of processes on one host, with words that announce their progress.

A segment is a file in /dev/shm. It is unlinked as soon as all processes have mapped it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from collectives.agreement import exchange_bytes
from collectives.kernel import NativeWindow, kernel
from collectives.transport import Transport
from collectives.waiting import Watch

logger = logging.getLogger(__name__)

SHARED_MEMORY_DIR = Path("/dev/shm")

INLINE_BYTES = 1 << 17  # room per rank for arrays that travel with an exchange; it may use 1 / size of it
PIPE_BYTES = 1 << 20  # per rank: partial sums for the ranks that reduce them
RESULT_BYTES = 1 << 19  # per rank: finished chunks for the other ranks
DEPTH = 2  # number of chunks that may be in progress at once
LINE_BYTES = 64

# The words of a rank, in 8-byte units: one writer, many readers. The words of an exchange exist twice, for odd and even
# exchanges. Each other word is the number of chunks that the rank has passed; it only grows.
SEQUENCE, FINGERPRINT, COUNT, NBYTES = 0, 2, 4, 6
PRODUCED, CONSUMED, REDUCED, FETCHED = 8, 9, 10, 11
TOO_LARGE = (1 << 64) - 1  # in NBYTES: the arrays do not travel with the exchange
STAGED = TOO_LARGE - 1  # in NBYTES: partial sums are in the pipe before the exchange
WAKES = 13  # whether the rank wakes those that sleep until a word of its has changed; 12 counts them
WORDS = 16

_SPIN_NS = 40  # of the kernel for each poll of `Watch.spins`, as long as a poll in Python


def create_segment(nbytes: int, directory: Path = SHARED_MEMORY_DIR) -> tuple[mmap.mmap, Path]:
    """Create a segment of zeros, with its memory reserved.

    The caller hands the path to the other processes, waits until they have mapped it, and unlinks it. The memory then
    lives until the last mapping is gone, even if processes are killed.

    Raises:
        OSError: The directory is missing or has too little room. No file is left behind.
    """
    path = directory / f"popdist-{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return _mapped(descriptor, nbytes, reserves=True), path
    except OSError:
        path.unlink()
        raise


def open_segment(path: Path, nbytes: int) -> mmap.mmap:
    """Map a segment that another process of this host has created.

    Raises:
        OSError: The file does not exist: the other process is on another host or in another container.
    """
    return _mapped(os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes)


_descriptors: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # of all segments


def _mapped(descriptor: int, nbytes: int, reserves: bool = False) -> mmap.mmap:
    """Map a segment, and reserve its memory before if asked; its descriptor is closed with it."""
    try:
        if reserves:  # without the reservation a full file system would raise SIGBUS at the first write
            os.posix_fallocate(descriptor, 0, nbytes)
        segment = mmap.mmap(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    weakref.finalize(segment, os.close, descriptor).atexit = False
    _descriptors[segment] = descriptor
    return segment


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED = 0x10  # of Linux


def _keep_private() -> None:
    """Give a forked child segments of its own at the same places, which are copied page by page when it writes.

    The child has arrays in shared memory, such as mean gradients, which it may change without a collective call.
    """
    for segment, descriptor in list(_descriptors.items()):
        memory = np.frombuffer(segment, np.uint8)
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = memory.__array_interface__["data"][0]
        if _libc.mmap(address, memory.nbytes, protection, flags, descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), "a forked child cannot make shared memory its own")


os.register_at_fork(after_in_child=_keep_private)


def share_segment(
    transport: Transport, nbytes: int, directory: Path = SHARED_MEMORY_DIR, hosts: Sequence[int] = ()
) -> mmap.mmap | None:
    """Create one segment for all ranks of `transport`, or one per host; a collective call.

    Args:
        transport: Transport between the ranks.
        nbytes: Size of this rank's segment.
        directory: Directory of the segment's file.
        hosts: Host number of each rank; default: all ranks are on one host.

    Returns:
        The segment, or None on all ranks if any rank cannot create or map its segment.
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
    """Return a memory fence, which keeps the processor from reordering stores around a flag; None on x86."""
    if platform.machine() in ("x86_64", "AMD64", "i686"):
        return None
    lock = threading.Lock()

    def fence() -> None:  # an atomic read-modify-write with acquire semantics, then one with release semantics
        with lock:
            pass

    return fence


FENCE = _make_fence()


class Window:
    """The shared memory of one channel, as one rank uses it.

    Args:
        memory: Zeroed memory of at least `channel_bytes(size)` bytes, shared by all ranks.
        rank: This rank.
        size: Number of ranks.
        watch: Limits and messages of waits.

    Attributes:
        words: Words of all ranks.
        mine: Index of this rank's first word.
        others: Index of the first word of each other rank.
        chunks: Number of chunks that have passed through the window.
        native: The same words in the native kernel, which then sets and awaits them; None without it.
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
        found = kernel()
        self.native: NativeWindow | None = (
            found.Window(memory, rank, size, watch.spins * _SPIN_NS, _patience(self.words, rank, size, watch))
            if found is not None
            else None
        )

    def announce(self, word: int, value: int) -> None:
        """Set one of this rank's words, after all earlier writes are visible."""
        if self.native is not None:
            self.native.announce(word, value)
            return
        if FENCE:
            FENCE()
        self.words[self.mine + word] = value

    def await_all(self, word: int, value: int) -> None:
        """Wait until the word of every other rank has reached `value`."""
        if self.native is not None:
            self.native.await_all(word, value)
            return
        words = self.words
        for other in self.others:
            if words[other + word] < value:
                self._spin(other + word, value)
        if FENCE:
            FENCE()

    def await_rank(self, rank: int, word: int, value: int) -> None:
        """Wait until the word of one rank has reached `value`."""
        if self.native is not None:
            self.native.await_rank(rank, word, value)
            return
        index = rank * WORDS + word
        if self.words[index] < value:
            self._spin(index, value)
        if FENCE:
            FENCE()

    def _spin(self, index: int, value: int) -> None:
        """Wait until the word at `index` has reached `value`."""
        words = self.words
        for _ in range(self._watch.spins):
            if words[index] >= value:
                return
        self._watch.wait_patiently(
            lambda: words[index] >= value, lambda: _behind(words, self.rank, self.size, index % WORDS, value)
        )

    def catch_up(self) -> None:
        """Set all progress words of this rank to the number of passed chunks."""
        for word in (PRODUCED, CONSUMED, FETCHED, REDUCED):
            self.announce(word, self.chunks)

    def close(self) -> None:
        """Release the memory."""
        self.native = None
        self.words.release()


def _patience(words: memoryview, rank: int, size: int, watch: Watch) -> Callable[[NativeWindow, int, int], None]:
    """Return the function with which the native kernel goes on waiting; it does not refer to the window."""

    def wait_on(native: NativeWindow, index: int, value: int) -> None:
        owner, word = divmod(index, WORDS)
        pause = partial(native.pause, index, value) if words[owner * WORDS + WAKES] else None
        watch.wait_on(lambda: words[index] >= value, lambda: _behind(words, rank, size, word, value), pause)

    return wait_on


def _behind(words: memoryview, rank: int, size: int, word: int, value: int) -> list[int]:
    """Return the ranks other than `rank` whose word has not reached `value`."""
    return [other for other in range(size) if other != rank and words[other * WORDS + word] < value]


def channel_bytes(size: int) -> int:
    """Return the size of the memory of one channel between `size` ranks."""
    return pipe_start(size, size)


def inline_start(size: int, rank: int, parity: int) -> int:
    """Return the byte offset of a rank's contributions to an odd or even exchange."""
    return size * WORDS * 8 + (rank * 2 + parity) * INLINE_BYTES


def pipe_start(size: int, rank: int) -> int:
    """Return the byte offset of a rank's pipe; its results follow."""
    return inline_start(size, size, 0) + rank * (PIPE_BYTES + RESULT_BYTES)
