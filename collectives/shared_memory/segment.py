"""Memory that several processes of one host share: a file in /dev/shm, mapped by all and unlinked at once."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from collectives.agreement import exchange_bytes
from collectives.transport import Transport

logger = logging.getLogger(__name__)

SHARED_MEMORY_DIR = Path("/dev/shm")


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
