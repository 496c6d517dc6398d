"""The end of a process that fails: noticing it, and ending where Python would wait or report another status."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

logger = logging.getLogger(__name__)

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

    def note_exit(status: str | int | None = None) -> None:
        if status not in (None, 0) and threading.current_thread() is threading.main_thread():
            note(status & 0xFF if isinstance(status, int) else 1)
        previous_exit(status)

    sys.excepthook = note_exception
    sys.exit = note_exit  # type: ignore[assignment]  # the only place where the status is visible before the end


def follows_from_another(error: BaseException) -> bool:
    """Return whether the reason is that another instance has come to its end, which that one's words explain better."""
    from collectives import LayoutMismatchError

    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, LayoutMismatchError) and reason.closed:
            return True
        reason = reason.__cause__ or reason.__context__
    return False


def end_with(status: int, reason: str = "") -> None:
    """End this process where Python's own end is of no use; does not return.

    What was printed and logged is written before. Exit handlers that have not run yet do not run.

    Args:
        status: of the process.
        reason: logged as an error; "" where another process says it.
    """
    if reason:
        logger.error(reason)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it may be closed, or nobody's
            stream.flush()
    os._exit(status)


THREADS_GRACE_S = 1.0
"""How long a process that has failed waits for its other threads. Python waits without a limit, and meanwhile all other
instances wait for this one."""


class LastThreads:
    """Ends this process a while after its main thread has failed, if threads that are no daemons are still there then.

    Make one while the program runs, once.

    Args:
        has_failed: asked when the main thread has ended.
        abandon: called just before this process ends.
    """

    def __init__(self, has_failed: Callable[[], bool], abandon: Callable[[], None]) -> None:
        # It waits for its threads before what registers later is called. Seldom needed: poprun starts without it.
        import concurrent.futures.thread  # noqa: F401

        self._has_failed = has_failed
        self._abandon = abandon
        self._is_waiting = threading.Event()  # Python, for the threads
        # As concurrent.futures does it; what is registered with `atexit` is called when the threads have ended.
        threading._register_atexit(self._is_waiting.set)  # type: ignore[attr-defined]

    def watch(self, status: int) -> None:
        """Begin to watch, when the main thread fails; a new thread, because Python starts none any more at its end.

        Args:
            status: with which this process ends then.
        """
        threading.Thread(target=self._end_in_time, args=(status,), name="popdist-last-threads", daemon=True).start()

    def _end_in_time(self, status: int) -> None:
        self._is_waiting.wait()
        if not self._has_failed():
            return
        give_up = time.monotonic() + THREADS_GRACE_S
        for thread in _others():
            thread.join(max(0.0, give_up - time.monotonic()))
        if left := _others():
            names = ", ".join(thread.name for thread in left)
            limit = f"THREADS_GRACE_S = {THREADS_GRACE_S:g} s"
            logger.warning("the program has failed; it ends without waiting more than %s for threads: %s", limit, names)
            self._abandon()
            end_with(status)


def _others() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
