"""Example programs; start with `python -m popdist.examples.digits`."""

from __future__ import annotations

import sys
from types import TracebackType


def describe_obstacle(error: BaseException, program: str) -> str:
    """Return one sentence about a missing library or missing data; "" for other errors."""
    for each in (error, error.__cause__):
        if isinstance(each, ImportError):
            from popdist.extras import describe_missing

            return describe_missing(each, program)
    from popdist.examples.digits_data import DataError

    return f"{program}: {error}" if isinstance(error, DataError) else ""


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if text := describe_obstacle(error, sys.argv[0].rpartition("/")[2]):
        print(text, file=sys.stderr)
    else:
        _shown_before(kind, error, trace)


_shown_before = sys.excepthook
if sys.argv[:1] == ["-m"]:  # Python is about to run an example as a program
    sys.excepthook = _show
