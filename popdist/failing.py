"""The end of a failing process: noticing the failure, and exiting where Python would wait or lose the status."""

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
"""Delay before an instance shows an error that only follows from another instance's end. poprun ends it earlier, so the
output of the instance that failed first is not buried."""


def notice_failure(note: Callable[[int], None], is_ended_soon: Callable[[], bool]) -> None:
    """Install hooks in front of the program's `sys.excepthook` and `sys.exit`. Call it once.

    Args:
        note: Function to call with the exit status, in the main thread, before the exception is shown.
        is_ended_soon: Function that returns whether a supervisor ends this process if another instance ends too early.
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
    sys.exit = note_exit  # type: ignore[assignment]  # only here the status is visible before the process ends


def follows_from_another(error: BaseException) -> bool:
    """Return whether the error follows from the end of another instance, whose own output explains more."""
    from collectives import LayoutMismatchError

    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, LayoutMismatchError) and reason.closed:
            return True
        reason = reason.__cause__ or reason.__context__
    return False


def end_with(status: int, reason: str = "") -> None:
    """End this process at once, without Python's own shutdown; does not return.

    Printed and logged output is flushed first. Exit handlers that have not run yet do not run.

    Args:
        status: Exit status of the process.
        reason: Error to log; "" if another process reports it.
    """
    if reason:
        logger.error(reason)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream may be closed or None
            stream.flush()
    os._exit(status)


THREADS_GRACE_S = 1.0
"""Time that a failed process waits for its other threads. Python would wait without a limit, and meanwhile all other
instances would wait for this one."""


class LastThreads:
    """The limit on a failed process's wait for its non-daemon threads.

    Make one object while the program runs.

    Args:
        has_failed: Whether the program has failed; called when the main thread has ended.
        abandon: Function to call just before this process ends.
    """

    def __init__(self, has_failed: Callable[[], bool], abandon: Callable[[], None]) -> None:
        # The last registered handler runs first. This module's own handler waits for the module's threads, so the
        # module must be imported before ours is registered. It is imported here because poprun must start without it.
        import concurrent.futures.thread  # noqa: F401

        self._has_failed = has_failed
        self._abandon = abandon
        self._is_waiting = threading.Event()  # set when Python begins to wait for threads
        # As in concurrent.futures: handlers of `atexit` would run only after the threads have ended.
        threading._register_atexit(self._is_waiting.set)  # type: ignore[attr-defined]

    def watch(self, status: int) -> None:
        """Start the watching thread as soon as the main thread fails; later, Python starts no threads any more.

        Args:
            status: Exit status of this process in that case.
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
