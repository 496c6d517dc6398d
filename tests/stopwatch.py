"""Measuring how long something takes, for promises about a machine that has nothing else to do.

Only for the complete tier: the default one says nothing about how long something takes.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

EVERYTHING = 255
"""As many cores as a test asks for beside which no other one is to run (`@pytest.mark.cores(EVERYTHING)`)."""
LOOK_S = 0.02
PAUSE_S = 0.05
"""Between two looks no more than this is counted: a virtual machine may stand still for a second or two."""


class Stopwatch:
    """Counts the seconds of a `with`, those of a busy machine by the share of it that one process gets.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _count(self) -> None:
        cores = len(os.sched_getaffinity(0))
        looked_at_s = time.monotonic()
        while not self._is_over.wait(LOOK_S):
            now_s = time.monotonic()
            self.seconds += min(now_s - looked_at_s, PAUSE_S) / max(1.0, processes_that_run() / cores)
            looked_at_s = now_s


def processes_that_run() -> float:
    """How many run or wait for a core, besides this one: now, or in the last minute, whichever is more."""
    words = Path("/proc/loadavg").read_text().split()
    return max(float(words[0]), int(words[3].partition("/")[0]) - 1.0)
