"""Notices when a program fails: by an exception that nobody has caught, or by `sys.exit` with a status."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

CAUSE_FIRST_S = 3.0
"""How long an instance that fails only because another one has ended keeps that to itself: poprun ends it in less, and
what the other one wrote is not buried."""


def notice_failure(note: Callable[[int], None], is_ended_soon: Callable[[], bool]) -> None:
    """Install hooks in front of those that the program has; once.

    Args:
        note: called with the exit status, in the main thread, before the exception is shown.
        is_ended_soon: whether somebody ends this process when another instance has ended too early.
    """
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def note_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note(130 if issubclass(kind, KeyboardInterrupt) else 1)
        if is_ended_soon() and follows_from_another(error):
            time.sleep(CAUSE_FIRST_S)
        previous_hook(kind, error, trace)

    def note_exit(status: Any = None) -> None:
        if status not in (None, 0) and threading.current_thread() is threading.main_thread():
            note(status & 0xFF if isinstance(status, int) else 1)
        previous_exit(status)

    sys.excepthook = note_exception
    sys.exit = note_exit  # type: ignore[assignment]  # the only place where the status is visible before the end


def follows_from_another(error: BaseException) -> bool:
    """Whether the reason is that another instance has come to its end, which that one's words explain better."""
    from collectives import LayoutMismatchError

    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, LayoutMismatchError) and reason.closed:
            return True
        reason = reason.__cause__ or reason.__context__
    return False
