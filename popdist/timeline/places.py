"""Lines of the program in which its thread is between two steps, outside of phases and collectives."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OF_OTHERS = tuple(
    {
        *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(os.path.join(_ROOT, name, "") for name in ("collectives", "popdist", "strategies")),
        "<frozen ",
    }
)


def line_of(thread: int) -> str:
    """Return the innermost line of the program itself in a thread, as `train.py:12`; empty if there is none."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_OF_OTHERS):
        frame = frame.f_back
    return "" if frame is None else f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def _shown(file: str) -> str:
    try:
        near = os.path.relpath(file)
    except (OSError, ValueError):  # the working directory is gone
        return file
    return file if near.startswith("..") or file.startswith("<") else near
