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
_NUMBER_BYTES = 8
_WINDOW = 64
assert RECORD.size == _NUMBER_BYTES + EVENT.itemsize == 1 << _SHIFT

Append = Callable[[int, int, int, int], None]


@final
class Ring:
    """A ring buffer of events that threads have appended and nobody has taken yet.

    To draw a number, to fill a slot and to copy slots is one call into C each, which no other thread interrupts (a copy
    by NumPy's indexing would let others run): a slot holds a whole record or another one. A thread that has a number
    and has not filled the slot yet is waited for by `take`, once: an exception may have kept it from doing so.

    Args:
        slots: a power of two; more records than that between two calls of `take` are lost.
        now_ns: the clock.
    """

    def __init__(self, slots: int = 1 << 16, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        if slots & (slots - 1) or slots < 1:
            raise ValueError(f"a ring has {slots} slots; use a power of two")
        self._memory = bytearray(slots << _SHIFT)
        self._size = slots
        self._taken = 0
        self._hole = 0  # the number of a record that was missing when the last call ended, though later ones were there
        self.append = self._appender(slots - 1, now_ns)

    def _appender(self, mask: int, now_ns: Callable[[], int]) -> Append:
        memory, pack, number_of_next = self._memory, RECORD.pack_into, count(1).__next__

        def append(kind: int, track: int, name: int, value: int) -> None:
            """Append an event that happens now; from any thread."""
            number = number_of_next()
            pack(memory, (number & mask) << _SHIFT, number, now_ns(), kind, track, name, value)

        return append

    def take(self, waits: bool = True) -> tuple[np.ndarray, int]:
        """Return the events that have come since the last call, in order, and how many were lost; from one thread.

        Args:
            waits: leave what comes after a record that is still missing to the next call.

        Returns:
            An array of `EVENT`, and a number.
        """
        first, window = self._taken + 1, min(_WINDOW, self._size)
        slots, numbers = self._following(first, window)
        while window < self._size and numbers[-1] >= first:
            window *= 2
            slots, numbers = self._following(first, window)
        newest = max(numbers)
        if newest < first:
            return np.empty(0, EVENT), 0
        if numbers[: newest - self._taken] == list(range(first, newest + 1)):  # no hole, and nothing was overwritten
            self._taken, self._hole = newest, 0
            return _events(slots, newest - first + 1), 0
        hole = next((number for number, found in enumerate(numbers, first) if found < first), first + window)
        if waits and newest < first + self._size and hole != self._hole:
            self._taken, self._hole = hole - 1, hole
            return _events(slots, hole - first), 0
        return self._all_that_is_left(first)

    def _all_that_is_left(self, first: int) -> tuple[np.ndarray, int]:
        """Return what is left, oldest first, after the ring was overtaken or a record never came."""
        slots, _ = self._following(first, self._size)
        rows = np.frombuffer(slots, "<u8").reshape(self._size, -1)
        rows = rows[rows[:, 0] >= first]
        rows = rows[np.argsort(rows[:, 0])]
        newest = int(rows[-1, 0])
        lost = newest - self._taken - len(rows)
        self._taken, self._hole = newest, 0
        return _events(rows.tobytes(), len(rows)), lost

    def _following(self, first: int, count: int) -> tuple[bytes | bytearray, list[int]]:
        """Return a copy of so many slots, from that of the record with this number on, and the numbers in them.

        Numbers are a list, because a spill mostly finds a few records and cold caches, where NumPy's first calls cost
        more than anything that is done to so few.
        """
        begin = (first & (self._size - 1)) << _SHIFT
        end = begin + (count << _SHIFT)
        copied = self._memory[begin:end]
        if end > len(self._memory):
            copied += self._memory[: end - len(self._memory)]
        return copied, memoryview(copied).cast("Q")[:: RECORD.size // _NUMBER_BYTES].tolist()


def _events(slots: bytes | bytearray, count: int) -> np.ndarray:
    """Return the first events in a copy of slots, seen there: what follows a number is an event as `EVENT` has it."""
    return np.ndarray((count,), EVENT, slots, _NUMBER_BYTES, (RECORD.size,))
