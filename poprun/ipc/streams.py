"""The program's standard streams: terminals for output, and standard input on its way to instance 0.

A stream is a terminal for the program if it is one for poprun, so that progress bars and colours are as they are
without poprun. mpirun could pass standard input on, but Open MPI 5.0.11 does not pass on its end: `echo hello | mpirun
cat` never ends. So poprun reads pieces, and the agent of instance 0 hands them over.
"""

from __future__ import annotations

import os
from contextlib import suppress

PIPE_BYTES = 1 << 18
_TERMINAL_BYTES = 1 << 12


def describe_terminals(tag_columns: int) -> str:
    """Describe the terminals among our own streams in one word, such as `1,2:24x80`, or `-`.

    Args:
        tag_columns: what tags take from the width.
    """
    found = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    if not found:
        return "-"
    size = os.get_terminal_size(found[0])
    columns = max(size.columns - tag_columns, 20) if size.columns else 0
    return f"{','.join(map(str, found))}:{size.lines}x{columns}"


def open_outputs(terminals: str) -> dict[int, tuple[int, int]]:
    """Open a pipe, or a terminal of `describe_terminals`, for descriptors 1 and 2: our reading and the writing end."""
    numbers, _, size = terminals.partition(":")
    wanted = set(numbers.split(","))
    return {target: _open_terminal(size) if str(target) in wanted else os.pipe() for target in (1, 2)}


def enlarge(descriptor: int) -> int:
    """Let a pipe hold more, where the system allows it; how many bytes it, or a terminal, holds before writers wait."""
    import fcntl

    try:
        return fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except PermissionError:  # the user has too many large pipes
        return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    except OSError:
        return _TERMINAL_BYTES


def _open_terminal(size: str) -> tuple[int, int]:
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # line ends stay as the program writes them
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    lines, _, columns = size.partition("x")
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", int(lines), int(columns), 0, 0))
    return ours, theirs


_PIECE_BYTES = 1 << 16


class InputSource:
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
        """Read the next piece; empty at the end."""
        data = b""
        with suppress(OSError):
            data = os.read(self.descriptor, _PIECE_BYTES)
        self._is_wanted = False
        self._is_at_end = not data
        return data


class InputFeed:
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
