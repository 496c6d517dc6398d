"""A ring of fixed-size records in memory, to which any thread appends without a lock."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from itertools import count
from typing import final

import numpy as np

from popdist.timeline.events import EVENT

RECORD = struct.Struct("<QqHHIq")
"""The number of the record, which is 0 where there never was one, and an event."""
_SHIFT = 5  # records are 32 bytes long
_WINDOW = 256
_SLOT = np.dtype([("number", "<u8"), *((name, EVENT[name]) for name in EVENT.names or ())])
assert RECORD.size == _SLOT.itemsize == 1 << _SHIFT

Append = Callable[[int, int, int, int], None]


@final
class Ring:
    """What threads have appended and nobody has taken yet.

    To draw a number and to fill a slot is one call into C each, which no other thread interrupts: a slot holds a whole
    record or another one. A thread that has a number and has not filled the slot yet is waited for by `take`.

    Args:
        slots: a power of two; more records than that between two calls of `take` are lost.
        now_ns: the clock.
    """

    def __init__(self, slots: int = 1 << 16, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        if slots & (slots - 1) or slots < 1:
            raise ValueError(f"a ring has {slots} slots; use a power of two")
        self._memory = bytearray(slots << _SHIFT)
        self._slots = np.frombuffer(self._memory, _SLOT)
        self._taken = 0
        self.append = self._appender(slots - 1, now_ns)

    def _appender(self, mask: int, now_ns: Callable[[], int]) -> Append:
        memory, pack, number_of_next = self._memory, RECORD.pack_into, count(1).__next__

        def append(kind: int, track: int, name: int, value: int) -> None:
            """Append an event that happens now; from any thread."""
            number = number_of_next()
            pack(memory, (number & mask) << _SHIFT, number, now_ns(), kind, track, name, value)

        return append

    def take(self) -> tuple[np.ndarray, int]:
        """The events that have come since the last call, in order, and how many were lost; from one thread.

        Returns:
            An array of `EVENT`, and a number.
        """
        size, first = len(self._slots), self._taken + 1
        window = min(_WINDOW, size)
        slots = self._following(first, window)
        while window < size and slots[-1]["number"] >= first:
            window *= 2
            slots = self._following(first, window)
        has_come = slots["number"] >= np.uint64(first)
        slots = slots[: window if has_come.all() else int(np.argmin(has_come))]
        if not len(slots):
            return np.empty(0, EVENT), 0
        numbers = slots["number"]
        is_newer = numbers >= np.uint64(first + size)
        if not is_newer.any():
            self._taken = int(numbers[-1])
            return _events(slots), 0
        slots = np.sort(slots, order="number")  # it was overtaken: all that is left, oldest first
        lost = int(slots["number"][-1]) - self._taken - len(slots)
        self._taken = int(slots["number"][-1])
        return _events(slots), lost

    def _following(self, first: int, count: int) -> np.ndarray:
        """A copy of so many slots, from that of the record with this number on."""
        slots: np.ndarray = self._slots[np.arange(first, first + count) & (len(self._slots) - 1)]
        return slots


def _events(slots: np.ndarray) -> np.ndarray:
    events = np.empty(len(slots), EVENT)
    for name in EVENT.names or ():
        events[name] = slots[name]
    return events
