"""The file of this instance's timeline.

A thread writes it every 50 ms, decides which steps are left out, and samples the current line of the program.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO, final

import numpy as np

from popdist.records.private_files import open_recording
from popdist.timeline.clocks import Exchange
from popdist.timeline.events import (
    CLOCKS,
    END,
    EVENT,
    EVENTS,
    HEADER,
    MAGIC,
    EventKind,
    block,
    json_block,
    names_block,
    pack_events,
    pack_exchanges,
)
from popdist.timeline.gauges import Gauge, read_gauges
from popdist.timeline.recorder import Recorder, RingBuffer

logger = logging.getLogger(__name__)

EVERY_S = 0.05
_GAUGES_EVERY = 10
_LAST_WORDS = 4096
"""Bytes reserved for the last blocks."""
_RESERVE = 0.95
"""Part of the limit for complete steps. Even a step that is left out records its begin, and measurements continue."""
_MOST_HALVINGS = 20

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OF_OTHERS = tuple(
    {
        *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(os.path.join(_ROOT, name, "") for name in ("collectives", "popdist", "strategies")),
        "<frozen ",
    }
)


@final
class TimelineFile:
    """The file of an instance, and the thread that writes it. Errors of the file never disturb the program.

    Args:
        path: Path of the file. An existing file is replaced; if another process writes to it, a new name is chosen.
        header: Content of the first block.
        limit_bytes: Size limit. The closer the file comes to it, the more steps are left out, finally all of them.
        now_ns: Clock of the events.

    Attributes:
        path: Path that was chosen in the end.
        recorder: Instrument whose events are written.
        written_bytes: Size of the file so far.
        writing_s: CPU time of the writing thread so far.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, object],
        limit_bytes: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ring = RingBuffer(now_ns=now_ns)
        self._now_ns = now_ns
        self._limit_bytes = limit_bytes
        self.written_bytes = 0
        self.writing_s = 0.0
        self.recorder = Recorder(self._ring, lambda: stride_of(self.written_bytes, self._limit_bytes))
        self._take_exchanges: Callable[[], Sequence[Exchange]] = list
        self._gauge = Gauge(read_gauges)
        self._lost = 0  # number of events without room in the file
        self._lock = threading.Lock()
        self._is_closed = False
        self._running = threading.Lock()  # held until `close`; unlike an Event, a lock is awaited in one call
        self._running.acquire()
        self._file: BinaryIO | None = None
        self.path = path
        self._process = os.getpid()
        try:
            self._file = open_recording(path)
            self.path = Path(self._file.name)
        except OSError as error:
            self._fail(error)
        self._write(MAGIC + json_block(HEADER, header))
        self._thread = threading.Thread(target=self._spill_again_and_again, name="timeline", daemon=True)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def add(self, kind: bytes, value: object) -> None:
        """Write a block of JSON now."""
        with self._lock:
            self._write(json_block(kind, value))

    def align_by(self, take_exchanges: Callable[[], Sequence[Exchange]]) -> None:
        """Begin to write the exchanges that `take_exchanges` returns at each call."""
        self._take_exchanges = take_exchanges

    def spill(self, is_last: bool = False) -> None:
        """Write the events in memory now; any thread may call it."""
        with self._lock:
            events, lost = self._ring.take(waits=not is_last)
            if lost:
                events = np.append(_note_of_loss(events, lost), events)
            names = self.recorder.take_new_names()  # after taking events, so that it includes their names
            exchanges = self._take_exchanges()
            data = names_block(names) if names else b""
            data += block(EVENTS, pack_events(events)) if len(events) else b""
            data += block(CLOCKS, pack_exchanges(exchanges)) if exchanges else b""
            if self._lost or self.written_bytes + len(data) > self._limit_bytes - _LAST_WORDS:
                self._lost += len(events)  # all later events are lost too: their names may have had no room
                return
            self._write(data)

    def close(self) -> None:
        """Write the rest and end. Repeated calls do nothing; a forked process does not end its parent's file."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._running.release()
        if self._thread.is_alive():
            self._thread.join(5)
        self._gauge.look(self.recorder.measured, is_last=True)
        self.spill(is_last=True)
        if self._lost:
            self._write(block(EVENTS, pack_events(_note_of_loss(np.empty(0, EVENT), self._lost, self._now_ns()))))
        self._write(block(END, b""))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _spill_again_and_again(self) -> None:
        rounds = 0
        while not self._running.acquire(timeout=EVERY_S):
            if rounds % _GAUGES_EVERY == 0:
                self._gauge.look(self.recorder.measured)
            rounds += 1
            if (thread := self.recorder.idle_thread) and (line := line_of(thread)):
                self.recorder.seen_at(line)
            self.spill()
            self.writing_s = time.thread_time()

    def _write(self, data: bytes) -> None:
        if self._file is None or not data:
            return
        try:
            while data:  # a nearly full disk accepts only a part
                taken = self._file.write(data) or 0
                self.written_bytes += taken
                data = data[taken:]
        except OSError as error:
            self._file.close()
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._file = None
        logger.warning("the timeline cannot be written to %s: %s; the program goes on without", self.path, error)


def _note_of_loss(following: np.ndarray, lost: int, when_ns: int = 0) -> np.ndarray:
    """Return an EVENTS_LOST event with the time of the following events."""
    when = following["when_ns"][0] if len(following) else when_ns
    return np.array([(when, int(EventKind.EVENTS_LOST), 0, 0, lost)], EVENT)


def stride_of(written_bytes: int, limit_bytes: int) -> int:
    """Return n if every n-th step is recorded, given the present size of the file.

    Half of the limit is for all steps, a quarter for every second step, and so on, so each part covers the same number
    of steps. Strides are powers of two, so an instance with a smaller stride has all steps of an instance with a
    larger one.

    Returns:
        A power of two, or 0 if no further steps are recorded.
    """
    room = limit_bytes * _RESERVE
    stride = 1
    for _ in range(_MOST_HALVINGS):
        if written_bytes < room * (1 - 0.5 / stride):
            return stride
        stride *= 2
    return 0


def line_of(thread: int) -> str:
    """Return the innermost line of the program itself in a thread, e.g. `train.py:12`, or ""."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_OF_OTHERS):
        frame = frame.f_back
    return "" if frame is None else f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def _shown(file: str) -> str:
    try:
        near = os.path.relpath(file)
    except (OSError, ValueError):  # the working directory is gone
        return file
    return file if near.startswith("..") or file.startswith("<") else near
