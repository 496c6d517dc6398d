"""Moves what was recorded from memory into the file of this instance, every 50 ms, in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from popdist.timeline.blocks import (
    CLOCKS,
    END,
    EVENTS,
    HEADER,
    MAGIC,
    block,
    json_block,
    names_block,
    pack_events,
    pack_exchanges,
)
from popdist.timeline.clocks import Exchange
from popdist.timeline.events import EVENT, Kind
from popdist.timeline.gauges import read_gauges
from popdist.timeline.recorder import Recorder
from popdist.timeline.ring import Ring
from popdist.timeline.sampling import stride_of

logger = logging.getLogger(__name__)

EVERY_S = 0.05
_GAUGES_EVERY = 10


@final
class Recording:
    """The file of an instance, and the thread that writes it. What goes wrong with it never disturbs the program.

    Args:
        path: of the file; one that is there is replaced.
        header: what it says first.
        limit_bytes: how large it may be; steps are left out, so that it does not become larger.
        now_ns: the clock of events.

    Attributes:
        recorder: the instrument whose events are written.
        written_bytes: so many are in the file.
        writing_s: so much time of a core its thread has taken.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        limit_bytes: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ring = Ring(now_ns=now_ns)
        self._limit_bytes = limit_bytes
        self.written_bytes = 0
        self.writing_s = 0.0
        self.recorder = Recorder(self._ring, self._stride)
        self._take_exchanges: Callable[[], Sequence[Exchange]] = list
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._file: BinaryIO | None = None
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            self._fail(error)
        self._write(MAGIC + json_block(HEADER, header))
        self._thread = threading.Thread(target=self._spill_again_and_again, name="timeline", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def add(self, kind: bytes, value: Any) -> None:
        """Write a block of JSON now."""
        self._write(json_block(kind, value))

    def align_by(self, take_exchanges: Callable[[], Sequence[Exchange]]) -> None:
        """Write, from now on, the exchanges that this returns whenever it is called."""
        self._take_exchanges = take_exchanges

    def spill(self) -> None:
        """Write what is in memory now; from any thread."""
        with self._lock:
            events, lost = self._ring.take()
            if lost:
                events = np.append(events, _note_of_loss(events, lost))
            names = self.recorder.take_new_names()  # after the events: those of theirs are among them
            exchanges = self._take_exchanges()
            data = names_block(names) if names else b""
            data += block(EVENTS, pack_events(events)) if len(events) else b""
            data += block(CLOCKS, pack_exchanges(exchanges)) if exchanges else b""
            self._write(data)

    def close(self) -> None:
        """Write the rest and end; may be called again."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self._measure()
        self.spill()
        self._write(block(END, b""))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _spill_again_and_again(self) -> None:
        rounds = 0
        while not self._ending.wait(EVERY_S):
            if rounds % _GAUGES_EVERY == 0:
                self._measure()
            rounds += 1
            self.spill()
            self.writing_s = time.thread_time()

    def _measure(self) -> None:
        for name, number in read_gauges().items():
            self.recorder.measured(name, number)

    def _stride(self) -> int:
        return stride_of(self.written_bytes, self._limit_bytes)

    def _write(self, data: bytes) -> None:
        if self._file is None or not data:
            return
        try:
            self._file.write(data)
            self.written_bytes += len(data)
        except OSError as error:
            self._file.close()
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._file = None
        logger.warning("the timeline cannot be written to %s: %s; the program goes on without", self._path, error)


def _note_of_loss(events: np.ndarray, lost: int) -> np.ndarray:
    when = events["when_ns"][0] if len(events) else 0
    return np.array([(when, int(Kind.EVENTS_LOST), 0, 0, lost)], EVENT)
