"""Reading the stacks that Python's faulthandler writes. Pure."""

from __future__ import annotations

import re

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_MORE_THREADS = "..."
"""The last line where there are over 100 threads, and the main thread is not among those that are shown."""
_OF_LIBRARIES = re.compile(r"/lib(64)?/python3\.\d+/|<frozen ")


def innermost_line(stacks: str) -> str:
    """Where the main thread is, as `train.py, line 31, in forward`: the innermost place that belongs to no library.

    Args:
        stacks: of all threads, the main thread last, each from the innermost frame outwards; may be cut off or empty.

    Returns:
        The innermost frame of all where only libraries are on the stack; empty where there is no frame, or where the
        main thread is not shown.
    """
    frames = [match for line in _main_thread(stacks) if (match := _FRAME.fullmatch(line))]
    own = [frame for frame in frames if not _OF_LIBRARIES.search(frame["file"])]
    for frame in own or frames:
        return f"{frame['file']}, line {frame['line']}, in {frame['function']}"
    return ""


def _main_thread(stacks: str) -> list[str]:
    lines = stacks.splitlines()
    heads = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    return lines[heads[-1] :] if heads and _MORE_THREADS not in lines else []
