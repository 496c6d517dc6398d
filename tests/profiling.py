"""Calls whose functions a test sees."""

import sys
from collections.abc import Callable
from types import FrameType


def call_profiled(call: Callable[[], object], see: Callable[[FrameType, str, object], None]) -> None:
    """Make a call; `see` gets each event of this thread, as `sys.setprofile` describes them."""
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
