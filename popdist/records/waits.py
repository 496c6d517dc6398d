"""How long an instance has waited for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collectives.calls import Call


@final
class Waits:
    """An instrument that adds up the time from the beginning of each collective until all instances have come to it.

    Args:
        now_s: a clock.

    Attributes:
        waited_s: the sum.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.waited_s = 0.0
        self._now_s = now_s
        self._began_s = 0.0

    def operation_begins(self, number: int, call: Call) -> None:
        """See `collectives.instruments`."""
        self._began_s = self._now_s()

    def data_moves(self, nbytes: int) -> None:
        """See there."""
        self.waited_s += self._now_s() - self._began_s
