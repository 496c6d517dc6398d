"""Ending a process without what Python does at the end, or with another status than its program has given."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress


def end_with(status: int, reason: str = "") -> None:
    """End this process where Python's own end is of no use; does not return.

    What was printed and logged is written before. Exit handlers that have not run yet do not run.

    Args:
        status: of the process.
        reason: logged as an error; "" where another process says it.
    """
    if reason:
        logging.getLogger(__name__).error(reason)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it may be closed, or nobody's
            stream.flush()
    os._exit(status)
