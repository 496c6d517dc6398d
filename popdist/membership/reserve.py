"""Reserves: processes that are connected from the beginning, and begin their program when poprun needs a new instance.

Open MPI (5.0.11) connects only processes that have all started MPI, and refuses to make a communicator of processes
beside a lost one. So a reserve starts MPI with the others, before its program imports anything, and sleeps. It takes
part in every change of the members. When poprun starts its program, it is a spare that reads the journal from the
beginning.
"""

from __future__ import annotations

import atexit
import threading
import time

from popdist.failing import end_with
from popdist.membership.process import member, process
from popdist.membership.spares import has_news
from popdist.membership.standby import SLEEP_S
from popdist.records.progress import Role

LONG_SLEEP_S = 1.5 * SLEEP_S
"""The time that a reserve sleeps between two looks for news; a job has many reserves."""


def hold() -> None:
    """Sleep until poprun starts the program of this process. If the job ends before, end this process.

    Afterwards a thread takes part in changes of the members while the program is busy; it ends when the program reads
    the journal to its end.
    """
    if not member.is_ready or member.role is not Role.SPARE:
        return
    member.is_ready = False
    try:
        while not process.progress.is_to_begin:
            if not has_news():
                time.sleep(LONG_SLEEP_S)
    except SystemExit:  # Python cannot end by it before the program has begun
        atexit._run_exitfuncs()
        end_with(0)
    threading.Thread(target=_attend, name="popdist reserve", daemon=True).start()


def _attend() -> None:
    """Take part in changes of the members until the program does so itself."""
    try:
        while True:
            with member.looking:
                if member.is_ready:
                    return
                has_news()
            time.sleep(SLEEP_S)
    except SystemExit:
        return  # the program notices the end of the job where it reads the journal
    except BaseException as error:
        end_with(1, f"a new instance cannot follow the others: {error!r}")
