"""Standard input on its way to instance 0: poprun reads it in pieces, the agent of instance 0 hands them over.

mpirun could do it, but Open MPI 5.0.11 does not pass on its end: `echo hello | mpirun cat` never ends.
"""

from __future__ import annotations

import os
from contextlib import suppress

_PIECE_BYTES = 1 << 16


class Source:
    """poprun's side: one piece is under way at a time, so a program that does not read stops the reading."""

    def __init__(self, descriptor: int = 0) -> None:
        self.descriptor = descriptor
        self._is_wanted = False
        self._is_at_end = False

    def want(self) -> None:
        """Instance 0 is ready for a piece."""
        self._is_wanted = True

    @property
    def is_ready(self) -> bool:
        """Whether to wait for input now. In the background a terminal's input belongs to somebody else."""
        return self._is_wanted and not self._is_at_end and _is_ours(self.descriptor)

    def read(self) -> bytes:
        """The next piece; empty at the end."""
        data = b""
        with suppress(OSError):
            data = os.read(self.descriptor, _PIECE_BYTES)
        self._is_wanted = False
        self._is_at_end = not data
        return data


class Feed:
    """The agent's side: writes pieces to the program as fast as it reads them.

    Args:
        descriptor: the writing end of the program's standard input; -1 for instances that get none.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._held = b""

    @property
    def is_open(self) -> bool:
        """Whether the program may still be given something."""
        return self.descriptor >= 0

    @property
    def is_full(self) -> bool:
        """Whether a piece waits for the program to read."""
        return bool(self._held)

    def put(self, data: bytes) -> None:
        """Take the next piece; an empty one is the end."""
        if not data:
            self.close()
        self._held = data if self.is_open else b""

    def write(self) -> None:
        """Write what the program takes without waiting."""
        try:
            self._held = self._held[os.write(self.descriptor, self._held) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def close(self) -> None:
        """Tell the program that this was the end."""
        if self.is_open:
            os.close(self.descriptor)
        self.descriptor = -1
        self._held = b""


def _is_ours(descriptor: int) -> bool:
    try:
        return not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True
