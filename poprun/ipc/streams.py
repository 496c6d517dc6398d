"""The program's standard streams: terminals for output, and standard input on its way to instance 0.

The program gets a terminal if poprun has one, so that progress bars and colours look as without poprun. mpirun could
forward standard input, but Open MPI 5.0.11 does not forward its end: `echo hello | mpirun cat` never ends. So poprun
reads the input piece by piece, and the agent of instance 0 hands the pieces to the program.
"""

from __future__ import annotations

import os
from contextlib import suppress

PIPE_BYTES = 1 << 18
_TERMINAL_BYTES = 1 << 12


def describe_terminals(tag_columns: int) -> str:
    """Describe the terminals among poprun's own streams in one word, such as `1,2:24x80`, or `-` for none.

    Args:
        tag_columns: Columns that tags take from the width.
    """
    found = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    if not found:
        return "-"
    size = os.get_terminal_size(found[0])
    columns = max(size.columns - tag_columns, 20) if size.columns else 0
    return f"{','.join(map(str, found))}:{size.lines}x{columns}"


def open_outputs(terminals: str) -> dict[int, tuple[int, int]]:
    """Open a pipe or a terminal, as `describe_terminals` says, for descriptors 1 and 2; return (reader, writer)."""
    numbers, _, size = terminals.partition(":")
    wanted = set(numbers.split(","))
    return {target: _open_terminal(size) if str(target) in wanted else os.pipe() for target in (1, 2)}


def enlarge(descriptor: int) -> int:
    """Enlarge a pipe if the system allows it; return the bytes that it, or a terminal, holds before writers block."""
    import fcntl

    try:
        return fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except PermissionError:  # the user has too many large pipes already
        return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    except OSError:
        return _TERMINAL_BYTES


def _open_terminal(size: str) -> tuple[int, int]:
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # keeps line ends as the program writes them
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    lines, _, columns = size.partition("x")
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", int(lines), int(columns), 0, 0))
    return ours, theirs


_PIECE_BYTES = 1 << 16


class InputSource:
    """Standard input on poprun's side. Only one piece is under way, so reading stops if the program does not read."""

    def __init__(self, descriptor: int = 0) -> None:
        self.descriptor = descriptor
        self._is_wanted = False
        self._is_at_end = False

    def want(self) -> None:
        """Note that instance 0 is ready for a piece."""
        self._is_wanted = True

    @property
    def is_ready(self) -> bool:
        """Whether to wait for input now. In the background, a terminal's input belongs to another process."""
        return self._is_wanted and not self._is_at_end and _is_ours(self.descriptor)

    def read(self) -> bytes:
        """Read the next piece; empty at the end of the input."""
        data = b""
        with suppress(OSError):
            data = os.read(self.descriptor, _PIECE_BYTES)
        self._is_wanted = False
        self._is_at_end = not data
        return data


class InputFeed:
    """Standard input on the agent's side; it writes pieces to the program as fast as the program reads them.

    Args:
        descriptor: The writing end of the program's standard input; -1 for an instance without input.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._held = b""

    @property
    def is_open(self) -> bool:
        """Whether the program may still get input."""
        return self.descriptor >= 0

    @property
    def is_full(self) -> bool:
        """Whether a piece waits for the program to read it."""
        return bool(self._held)

    def put(self, data: bytes) -> None:
        """Take the next piece; an empty piece is the end of the input."""
        if not data:
            self.close()
        self._held = data if self.is_open else b""

    def write(self) -> None:
        """Write as much as the program takes without blocking."""
        try:
            self._held = self._held[os.write(self.descriptor, self._held) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def close(self) -> None:
        """Tell the program that the input has ended."""
        if self.is_open:
            os.close(self.descriptor)
        self.descriptor = -1
        self._held = b""


def _is_ours(descriptor: int) -> bool:
    try:
        return not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True
