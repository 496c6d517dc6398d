"""Bells in the memory that ranks of a host share: who waits for messages of the others sleeps until one rings.

A bell is a futex of Linux (futex(2)): to sleep costs no processor time, and to be woken less time than the end of a
sleep of some length. That counts where ranks share cores.
"""

from __future__ import annotations

import ctypes
import platform
import sys

LINE_BYTES = 64
"""What a bell takes, so that it shares no cache line."""

_SYSTEM_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1

CAN_RING = _SYSTEM_CALL > 0
"""Whether this machine has such bells; elsewhere waits have to poll."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bells:
    """One for each rank, which alone waits for it, and which any of the others rings.

    A ring that comes while its rank is awake ends the next wait at once. Of two that come at the same time one may be
    lost, with a wait that lasts as long as it was given.

    Args:
        memory: `LINE_BYTES` for each rank, zeroed, the same for all of them.
        rank: this rank.
    """

    def __init__(self, memory: memoryview, rank: int) -> None:
        self._call = ctypes.CDLL(None).syscall
        self._words = memory.cast("I")
        self._places = [ctypes.c_uint32.from_buffer(memory, start) for start in range(0, memory.nbytes, LINE_BYTES)]
        self._own = rank * (LINE_BYTES // 4)
        self._place = ctypes.byref(self._places[rank])
        self._heard = 0

    def ring(self, rank: int) -> None:
        """Wake a rank, after what it waits for has been written."""
        place = rank * (LINE_BYTES // 4)
        self._words[place] = (self._words[place] + 1) & 0xFFFFFFFF
        self._call(_SYSTEM_CALL, ctypes.byref(self._places[rank]), _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, seconds: float) -> None:
        """Return when the bell of this rank has rung since the last wait, at the latest after so many seconds."""
        limit, heard = _Time(int(seconds), int(seconds % 1 * 1e9)), ctypes.c_uint32(self._heard)
        self._call(_SYSTEM_CALL, self._place, _WAIT, heard, ctypes.byref(limit), None, 0)  # whatever it returns
        self._heard = self._words[self._own]
