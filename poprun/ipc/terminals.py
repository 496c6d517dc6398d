"""Which of a program's streams are terminals: those that are terminals for poprun itself.

A program then behaves as it does without poprun: progress bars and colours on a terminal, none in a file.
"""

from __future__ import annotations

import os

PIPE_BYTES = 1 << 18
_TERMINAL_BYTES = 1 << 12


def describe_terminals(tag_columns: int) -> str:
    """The terminals among our own streams, and their size, such as `1,2:24x80`, or `-`; one word.

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
    """For the descriptors 1 and 2 of a program: our reading end and its writing end.

    Args:
        terminals: what `describe_terminals` has said.
    """
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
