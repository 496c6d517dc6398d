"""All sinks of a job: its first instance writes to them, and the others could take that over.

Rows are on their way to each sink in a queue with an end, from which a thread takes them there.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, final

from popdist.records import Waits
from strategies.sinks.sink import Reading, Row, Sink, is_scalar, reading_of

logger = logging.getLogger("strategies.metrics")

WAIT_S = 1.0
"""The most seconds that the writer of a checkpoint waits for a busy sink."""

EVERY_S = 0.1
"""The seconds between two deliveries to a sink."""
MOST = 8192
"""So many rows wait for a sink at most; what comes then is dropped."""
AGAIN_S, AGAIN_AT_MOST_S = 1.0, 60.0
"""After an error it is tried again, first after so long, and then later and later."""
LOOK_S = 0.01
"""The seconds between two looks of a caller that waits until rows are written."""
CLOSING_S = 10.0
"""The most seconds that the end of a program waits for a busy sink."""


@dataclass(frozen=True)
class JobFacts:
    """The facts about the job that sinks need.

    Attributes:
        is_chief: whether this is the instance that writes for all; where some are lost it may become it.
        lost: how many instances are lost, without which the others carry on.
        restarts: how often the job has been started again.
        waits: how long this instance has waited for others; None where nobody has looked.
    """

    is_chief: Callable[[], bool] = lambda: True
    lost: Callable[[], int] = lambda: 0
    restarts: int = 0
    waits: Waits | None = None


@final
class Sinks:
    """Gets what is said of steps on every instance, and writes it on one of them, in threads of its own.

    The other instances keep the last rows. Where the first one is lost the next one goes on with these, so that no step
    is lost, and none is written twice.

    Raises:
        ValueError: a sink cannot be opened, on the instance that writes, the first time the job is started. Later that
            is only said.
    """

    def __init__(self, sinks: Sequence[Sink], job: JobFacts) -> None:
        self._sinks = sinks
        self._job = job
        self._kept: deque[Row] = deque(maxlen=MOST)  # while another instance writes
        self._deliveries: list[SinkDelivery] = []
        self._is_closed = self._has_left_out = False
        self._at_close: list[Callable[[Sinks], object]] = []
        if job.is_chief():
            self._begin(is_first=not job.restarts)
        atexit.register(self.close)  # behind all that was registered before, as waiting for the other instances

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Write numbers of one's own; to be called on every instance alike, and not a collective call.

        Nothing waits for arrays of JAX that are still being computed.

        Args:
            values: numbers by their names, or arrays of one.
            step: how many steps were made; what is written is in the order of the calls, whatever it says.

        Raises:
            TypeError: a value is no number, or the step is no whole one.
            ValueError: a value is no scalar, or a name cannot be written.
        """
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise TypeError(f"step is {step!r}, which is no whole number; give the number of steps made, as state.step")
        self.add(Row(step.__index__(), reading_of(values)))

    def log_scalars(self, values: Mapping[str, object], step: int) -> None:
        """Write those of the numbers that are; the first time that others are left out, say so."""
        scalars = {name: value for name, value in values.items() if is_scalar(value)}
        if len(scalars) < len(values) and not self._has_left_out:
            self._has_left_out = True
            others = ", ".join(name for name in values if name not in scalars)
            logger.info("sinks of metrics take numbers, and get nothing of %s", others)
        if scalars:
            self.log(scalars, step)

    def tell(self, step: int, read: Reading, samples: int) -> None:
        """Take what a training step has told.

        Args:
            step: how many were made with it.
            read: reads it; in another thread, and later.
            samples: so many elements of data were in its global batch.
        """
        self.add(Row(step, read, samples=samples, is_training=True))

    def add(self, row: Row) -> None:
        """Have a row written, here or where it has to be."""
        if self._is_closed:
            return
        if not self._deliveries:
            self._kept.append(row)
            if self._job.is_chief():
                self._take_over()
            return
        for delivery in self._deliveries:
            delivery.add(row)

    def wait(self, limit_s: float = WAIT_S) -> None:
        """Return when what has come is written, where this instance writes; see `SinkDelivery.wait`."""
        for delivery in self._deliveries:
            delivery.wait(limit_s)

    def at_close(self, call: Callable[[Sinks], object]) -> None:
        """Have something called when they are closed."""
        self._at_close.append(call)

    def close(self) -> None:
        """Write what is left, and say what could not be written; may be called again. At exit it happens by itself."""
        if self._is_closed:
            return
        if not self._deliveries and self._kept and self._job.is_chief():
            self._take_over()
        self._is_closed = True
        for delivery in self._deliveries:
            delivery.close()
        for call in self._at_close:
            call(self)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, is_first: bool) -> None:
        """Begin to write."""
        if is_first:
            self._open_all()
        self._deliveries = [SinkDelivery(sink, is_open=is_first) for sink in self._sinks]
        for delivery in self._deliveries:
            delivery.start()

    def _open_all(self) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                sink.open(goes_on=False)
            except Exception as error:
                for each in self._sinks[: number + 1]:
                    with suppress(Exception):
                        each.close()
                raise ValueError(f"{sink.name}: metrics cannot be written there: {error}; {sink.way_out}") from error

    def _take_over(self) -> None:
        """Write instead of another instance, which may have written a part of what was kept here."""
        self._begin(is_first=False)
        for row in self._kept:
            for delivery in self._deliveries:
                delivery.add(row)
        self._kept.clear()


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
