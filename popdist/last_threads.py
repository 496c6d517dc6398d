"""The end of a process that has failed in a job of several, which its other threads cannot put off."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # it waits for its threads before those that register later are called
import logging
import threading
import time
from collections.abc import Callable

from popdist.exit_status import end_with

logger = logging.getLogger(__name__)

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
