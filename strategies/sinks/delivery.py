"""Rows on their way to one sink: a queue with an end, and a thread that takes them there."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import final

from strategies.sinks.sink import Row, Sink

logger = logging.getLogger("strategies.metrics")

EVERY_S = 0.1
"""How often rows are taken to a sink."""
MOST = 8192
"""So many rows wait for a sink at most; what comes then is dropped."""
AGAIN_S, AGAIN_AT_MOST_S = 1.0, 60.0
"""After an error it is tried again, first after so long, and then later and later."""
LOOK_S = 0.01
"""How often is looked whether rows are written, by who waits for that."""
CLOSING_S = 10.0
"""How long the end of a program waits for a sink that is busy."""


@final
class SinkDelivery:
    """Takes rows to a sink. Whatever happens there, `add` returns at once.

    Attributes:
        dropped: how many rows it does not get.
    """

    def __init__(self, sink: Sink, is_open: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._is_open = is_open
        self._now_s = now_s
        self._rows: deque[Row] = deque()  # that have come
        self._taken: list[Row] = []  # of these, by the thread that delivers
        self._again_s = AGAIN_S
        self._not_before_s = now_s()
        self._has_failed = self._has_misread = False
        self._come = self._done = 0  # how many rows have come, and how many of these are written or left out
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def start(self) -> None:
        """Begin to deliver."""
        self._thread = threading.Thread(target=self._run, name=f"metrics to {self._sink.name}", daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Have a row delivered; takes well under a microsecond, and waits for nothing."""
        if self._waiting < MOST:
            self._rows.append(row)
            self._come += 1
        else:
            self.dropped += 1

    @property
    def _waiting(self) -> int:
        return self._come - self._done

    def deliver(self) -> None:
        """Deliver what has come, unless the sink has failed a short while ago."""
        if self._now_s() < self._not_before_s:
            return
        while self._rows:
            self._take(self._rows.popleft())
        if not self._taken:
            return
        try:
            if not self._is_open:
                self._sink.open(goes_on=True)
                self._is_open = True
            self._sink.write(self._taken)
        except Exception as error:  # whatever it is: the training goes on
            self._note(error)
            return
        self._done += len(self._taken)
        self._taken = []
        if self._has_failed:
            self._has_failed, self._again_s = False, AGAIN_S
            logger.info("metrics are written to %s again", self._sink.name)

    def wait(self, limit_s: float) -> None:
        """Return when what has come is written, or the sink has failed, or is busy for so long."""
        come, give_up_s = self._come, time.monotonic() + limit_s
        while self._done < come and not self._has_failed and time.monotonic() < give_up_s:
            time.sleep(LOOK_S)

    def close(self, limit_s: float = CLOSING_S) -> None:
        """Deliver what is left, and say what cannot be."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                logger.warning(
                    "%s is still busy after %g s (CLOSING_S), and gets no more; rows that it may lack: %d",
                    *(self._sink.name, limit_s, self.dropped + self._waiting),
                )
                return
        else:
            self._end()
        if lacking := self.dropped + self._waiting:
            logger.warning(
                "%s lacks %d rows of metrics, for which it was too slow or had failed", self._sink.name, lacking
            )

    def _take(self, row: Row) -> None:
        """Wait until the numbers of a row are computed."""
        try:
            _ = row.values
        except Exception as error:
            self.dropped += 1
            self._done += 1
            if not self._has_misread:
                logger.warning("the metrics of step %d cannot be read: %s; they are left out", row.step, error)
            self._has_misread = True
        else:
            self._taken.append(row)

    def _note(self, error: Exception) -> None:
        """Close what has failed, and say so the first time."""
        self._not_before_s = self._now_s() + self._again_s
        self._again_s = min(2 * self._again_s, AGAIN_AT_MOST_S)
        with suppress(Exception):
            self._sink.close()
        self._is_open = False
        if not self._has_failed:
            logger.warning(
                "metrics cannot be written to %s: %s; the training goes on, and they are kept and tried again: %s",
                *(self._sink.name, error, self._sink.way_out),
            )
        self._has_failed = True

    def _run(self) -> None:
        while not self._ending.wait(EVERY_S):
            self.deliver()
        self._end()

    def _end(self) -> None:
        self._not_before_s = self._now_s()  # once more, however short ago it has failed
        self.deliver()
        with suppress(Exception):
            if self._is_open:
                self._sink.close()
