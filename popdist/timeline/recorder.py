"""The instrument that records events, and its ring buffer."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from threading import get_ident
from typing import TYPE_CHECKING, final

import numpy as np

from collectives.instruments import CHECKPOINT, COMPILE, DATA, PHASES, RECOVERY
from popdist.timeline.events import EVENT, MAIN_TRACK, EventKind, bits_of

if TYPE_CHECKING:
    from collectives.calls import Call

_ALWAYS = frozenset((COMPILE, CHECKPOINT, RECOVERY))
"""Phases that are recorded even if their step is left out."""
(
    _STEP_BEGINS,
    _STEP_ENDS,
    _PHASE_BEGINS,
    _PHASE_ENDS,
    _OPERATION_BEGINS,
    _DATA_MOVES,
    _OPERATION_ENDS,
    _WAITS_FOR,
    _MEASURED,
    _REPLICA_BEGINS,
    _REPLICA_ENDS,
) = map(int, list(EventKind)[:11])

RECORD = struct.Struct("<QqHHIq")
"""The number of a record (0 in an unused slot), and an event."""
_SHIFT = 5  # records are 32 bytes long
_NUMBER_BYTES = 8
_WINDOW = 64

Append = Callable[[int, int, int, int], None]


assert RECORD.size == _NUMBER_BYTES + EVENT.itemsize == 1 << _SHIFT


@final
class RingBuffer:
    """A ring buffer of events: several threads append, one thread takes.

    Drawing a number, filling a slot, and copying slots are one C call each, during which no other thread runs. (NumPy's
    indexing would release the interpreter lock.) So a slot always holds a complete record. If a thread has drawn a
    number but not filled its slot, `take` leaves the record to its next call. If it is still missing then, it counts
    as lost: an exception may have stopped the thread.

    Args:
        slots: Number of slots, a power of two; more records than that between two calls of `take` are lost.
        now_ns: Clock.
    """

    def __init__(self, slots: int = 1 << 16, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        if slots & (slots - 1) or slots < 1:
            raise ValueError(f"a ring has {slots} slots; use a power of two")
        self._memory = bytearray(slots << _SHIFT)
        self._size = slots
        self._taken = 0
        self._hole = 0  # the number of the missing record at which the last call stopped
        self.append = self._appender(slots - 1, now_ns)

    def _appender(self, mask: int, now_ns: Callable[[], int]) -> Append:
        memory, pack, number_of_next = self._memory, RECORD.pack_into, count(1).__next__

        def append(kind: int, track: int, name: int, value: int) -> None:
            """Append an event with the present time; any thread may call it."""
            number = number_of_next()
            pack(memory, (number & mask) << _SHIFT, number, now_ns(), kind, track, name, value)

        return append

    def take(self, waits: bool = True) -> tuple[np.ndarray, int]:
        """Return the events since the last call, in order, and the number of lost events. One thread calls it.

        Args:
            waits: Whether to leave events after a missing record to the next call.

        Returns:
            An array of `EVENT`, and the number of lost events.
        """
        first, window = self._taken + 1, min(_WINDOW, self._size)
        slots, numbers = self._following(first, window)
        while window < self._size and numbers[-1] >= first:
            window *= 2
            slots, numbers = self._following(first, window)
        newest = max(numbers)
        if newest < first:
            return np.empty(0, EVENT), 0
        if numbers[: newest - self._taken] == list(range(first, newest + 1)):  # complete, nothing overwritten
            self._taken, self._hole = newest, 0
            return _events(slots, newest - first + 1), 0
        hole = next((number for number, found in enumerate(numbers, first) if found < first), first + window)
        if waits and newest < first + self._size and hole != self._hole:
            self._taken, self._hole = hole - 1, hole
            return _events(slots, hole - first), 0
        return self._all_that_is_left(first)

    def _all_that_is_left(self, first: int) -> tuple[np.ndarray, int]:
        """Return the remaining events in order, after the ring has overflowed or a record is missing for good."""
        slots, _ = self._following(first, self._size)
        rows = np.frombuffer(slots, "<u8").reshape(self._size, -1)
        rows = rows[rows[:, 0] >= first]
        rows = rows[np.argsort(rows[:, 0])]
        newest = int(rows[-1, 0])
        lost = newest - self._taken - len(rows)
        self._taken, self._hole = newest, 0
        return _events(rows.tobytes(), len(rows)), lost

    def _following(self, first: int, count: int) -> tuple[bytes | bytearray, list[int]]:
        """Copy `count` slots, from the slot of record `first` on; return the copy and the numbers of its records.

        The numbers are a list: a call mostly finds a few records and cold caches, so NumPy's first calls would cost
        more than the rest of the work.
        """
        begin = (first & (self._size - 1)) << _SHIFT
        end = begin + (count << _SHIFT)
        copied = self._memory[begin:end]
        if end > len(self._memory):
            copied += self._memory[: end - len(self._memory)]
        return copied, memoryview(copied).cast("Q")[:: RECORD.size // _NUMBER_BYTES].tolist()


def _events(slots: bytes | bytearray, count: int) -> np.ndarray:
    """Return a view of the first `count` events in a copy of slots."""
    return np.ndarray((count,), EVENT, slots, _NUMBER_BYTES, (RECORD.size,))


@final
class Recorder:
    """The instrument that appends an event for each observation to a ring, in about 0.3 us.

    Args:
        ring: Ring buffer for the events.
        stride: Function that returns n if every n-th step is recorded now, or 0 for none; called when data is read and
            when a step begins.
    """

    def __init__(self, ring: RingBuffer, stride: Callable[[], int] = lambda: 1) -> None:
        self._append = ring.append
        self._stride = stride
        self._names: dict[object, int] = {}
        self._new_names: deque[tuple[int, Mapping[str, object]]] = deque()
        self._next_number = count().__next__
        self._phases = {phase: self._number_of(phase, {"name": phase}) for phase in PHASES}
        self._step = -1
        self._skips = False
        self._is_in_step = True  # no line of the program is recorded before the first step
        self._is_busy = False
        self._thread = 0

    @property
    def idle_thread(self) -> int:
        """The id of the thread that makes steps if it is between steps, phases and collectives; otherwise 0."""
        return 0 if self._is_in_step or self._is_busy else self._thread

    def take_new_names(self) -> dict[int, Mapping[str, object]]:
        """Return the names of events since the last call, and perhaps names that no event has used yet."""
        return dict(self._new_names.popleft() for _ in range(len(self._new_names)))

    # ---- the observed events; see `collectives.instruments`

    def step_begins(self, step: int) -> None:
        self._is_in_step = True
        self._step = step
        self._skips = self._is_left_out(step)
        self._append(_STEP_BEGINS, MAIN_TRACK, 0, step)

    def step_ends(self, rows: int, loss: float) -> None:
        self._append(_STEP_ENDS, MAIN_TRACK, 0, rows)
        self._is_in_step, self._thread = False, get_ident()
        if not self._skips:
            self.measured("loss", loss)

    def step_numbers(self, numbers: Mapping[str, float]) -> None:
        if not self._skips:
            for name, number in numbers.items():
                self.measured(name, number)

    def phase_begins(self, phase: str) -> None:
        # a batch is read for the next step
        if phase == DATA:
            self._skips = self._is_left_out(self._step + 1)
        if not self._skips or phase in _ALWAYS:
            self._append(_PHASE_BEGINS, MAIN_TRACK, self._phases[phase], 0)
        self._is_busy = True

    def phase_ends(self, phase: str) -> None:
        if not self._skips or phase in _ALWAYS:
            self._append(_PHASE_ENDS, MAIN_TRACK, self._phases[phase], 0)
        self._is_busy = False

    def operation_begins(self, number: int, call: Call) -> None:
        self._is_busy = True
        if self._skips:
            return
        name = self._names.get(call.fingerprint)
        if name is None:
            said = {"name": call.title, "operation": call.kind, "bytes": call.nbytes, "call": str(call)}
            name = self._number_of(call.fingerprint, said)
        self._append(_OPERATION_BEGINS, MAIN_TRACK, name, number)

    def data_moves(self, nbytes: int) -> None:
        if not self._skips:
            self._append(_DATA_MOVES, MAIN_TRACK, 0, nbytes)

    def operation_ends(self) -> None:
        self._is_busy = False
        if not self._skips:
            self._append(_OPERATION_ENDS, MAIN_TRACK, 0, 0)

    def waiting_for(self, instances: Sequence[int]) -> None:
        for instance in instances:
            self._append(_WAITS_FOR, MAIN_TRACK, 0, instance)

    def replica_begins(self, replica: int, stage: int) -> None:
        if not self._skips:
            self._append(_REPLICA_BEGINS, 1 + stage, replica, 0)

    def replica_ends(self, replica: int, stage: int, part: int) -> None:
        if not self._skips:
            self._append(_REPLICA_ENDS, 1 + stage, replica, part)

    def measured(self, what: str, number: float) -> None:
        """Record that a quantity has this value now; any thread may call it."""
        name = self._names.get(what)
        if name is None:
            name = self._number_of(what, {"name": what})
        self._append(_MEASURED, MAIN_TRACK, name, bits_of(number))

    def seen_at(self, line: str) -> None:
        """Record that `idle_thread` is in this line of the program; any thread may call it."""
        name = self._names.get(line)
        if name is None:
            name = self._number_of(line, {"name": line})
        self._append(int(EventKind.SEEN_AT), MAIN_TRACK, name, 0)

    def note(self, kind: int, track: int, value: int) -> None:
        """Record any other event that happens now."""
        self._append(kind, track, 0, value)

    # ---- names and steps

    def _number_of(self, key: object, said: Mapping[str, object]) -> int:
        """Assign a number to a name, and announce it before its use; without a lock, which a fork could inherit."""
        number = self._next_number()
        self._new_names.append((number, said))
        return self._names.setdefault(key, number)

    def _is_left_out(self, step: int) -> bool:
        stride = self._stride()
        return not stride or step % stride > 0
