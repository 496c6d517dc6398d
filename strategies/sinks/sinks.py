"""All sinks of a job: the first instance writes to them, and another one takes over if it is lost.

Rows wait for each sink in a bounded queue, from which a thread delivers them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self, final

import popdist
from collectives import forks
from popdist.errors import EnvironmentMismatchError
from popdist.records import metric_words
from popdist.records.distribution_settings import DistributionSettings
from popdist.records.faults import ATTEMPT_VARIABLE
from strategies.sinks.files import CsvFile, JsonLines
from strategies.sinks.services import EXPERIMENT_VARIABLE, MlflowRun, Prometheus, TensorBoard, WandbRun
from strategies.sinks.sink import NO_DISTRIBUTIONS, Distribution, JobFacts, Reading, Row, Sink, is_scalar, reading_of

logger = logging.getLogger("strategies.metrics")

WAIT_S = 1.0
"""The most seconds that a checkpoint's writer waits for a busy sink."""

EVERY_S = 0.1
"""The seconds between two deliveries to a sink."""
MOST = 8192
"""The most rows that wait for a sink; further rows are dropped."""
MOST_DISTRIBUTIONS = 50_000
"""The most distributions, of about 1.5 KB, that wait for a sink; further rows lose theirs, but not their numbers."""
AGAIN_S, AGAIN_AT_MOST_S = 1.0, 60.0
"""The seconds until the first retry after an error, and the most seconds between retries; the time doubles."""
LOOK_S = 0.01
"""The seconds between two looks of a caller that waits until rows are written."""
CLOSING_S = 10.0
"""The most seconds that the end of a program waits for a busy sink."""


@final
class Sinks:
    """The receiver of the metrics of steps on every instance; one instance writes them, in threads of its own.

    The other instances keep the last rows. If the first instance is lost, the next one continues with its rows, so that
    no step is lost and none is written twice.

    Attributes:
        looks: The norms and histograms that were asked for with these sinks; None for none.

    Raises:
        ValueError: A sink cannot be opened on the instance that writes, at the first start of the job. After a restart
            that is only a warning.
    """

    def __init__(self, sinks: Sequence[Sink], job: JobFacts) -> None:
        self.looks: DistributionSettings | None = None
        self._sinks = sinks
        self._job = job
        self._kept: deque[Row] = deque(maxlen=MOST)  # while another instance writes
        self._with_distributions: deque[Row] = deque()  # those among the kept rows
        self._deliveries: list[SinkDelivery] = []
        self._is_closed = self._has_left_out = self._has_repeated = False
        self._last_step = 0
        self._at_close: list[Callable[[Sinks], object]] = []
        if job.is_chief():
            self._begin(is_first=not job.restarts)
        forks.at_exit(self.close)  # runs before the handlers registered earlier, such as waiting for other instances

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Write the caller's own numbers. Every instance must call it alike; it is not a collective call.

        The call does not wait for arrays that JAX still computes.

        Args:
            values: Numbers, or arrays with one number, by their names.
            step: Number of steps made. Rows are written in the order of the calls, whatever `step` is.

        Raises:
            TypeError: A value is not a number, or `step` is not an integer.
            ValueError: A value is not a scalar, or a name cannot be written.
        """
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise TypeError(f"step is {step!r}, which is not an integer; give the number of steps made, as state.step")
        self.add(Row(step.__index__(), reading_of(values)))

    def log_scalars(self, values: Mapping[str, object], step: int) -> None:
        """Write the scalars among the values; log the names of other values the first time."""
        scalars = {name: value for name, value in values.items() if is_scalar(value)}
        if len(scalars) < len(values) and not self._has_left_out:
            self._has_left_out = True
            others = ", ".join(name for name in values if name not in scalars)
            logger.info("sinks take only scalars, and leave out %s", others)
        if scalars:
            self.log(scalars, step)

    def add_step(
        self,
        step: int,
        read: Reading,
        samples: int,
        distributions: Mapping[str, Distribution] = NO_DISTRIBUTIONS,
    ) -> None:
        """Write the metrics of a training step.

        Args:
            step: Number of steps made, including this one.
            read: Function that reads the metrics, later and in another thread.
            samples: Number of elements of data in the global batch.
            distributions: Distributions of weights and gradients by name.
        """
        if step <= self._last_step and not self._has_repeated and self._job.is_chief():
            self._has_repeated = True
            logger.warning(
                "sinks get a row of step %d after that of step %d: a training began again, or several trainers write "
                "the same names to the same sinks, so their rows are mixed; open sinks for each training with "
                "strategies.metrics.open, or write names of your own with strategies.metrics.log",
                *(step, self._last_step),
            )
        self._last_step = step
        self.add(Row(step, read, samples=samples, is_training=True, distributions=distributions))

    def add(self, row: Row) -> None:
        """Queue a row for all sinks; on another instance than the chief, keep it for a takeover."""
        if self._is_closed:
            return
        if not self._deliveries:
            self._keep(row)
            if self._job.is_chief():
                self._take_over()
            return
        for delivery in self._deliveries:
            delivery.add(row)

    def wait(self, limit_s: float = WAIT_S) -> None:
        """Wait until the rows so far are written, if this instance writes; see `SinkDelivery.wait`."""
        for delivery in self._deliveries:
            delivery.wait(limit_s)

    def at_close(self, call: Callable[[Sinks], object]) -> None:
        """Register a function to be called when the sinks are closed."""
        self._at_close.append(call)

    def close(self) -> None:
        """Write the remaining rows, and warn of rows that could not be written. Runs at exit; may be called again."""
        if self._is_closed:
            return
        if not self._deliveries and self._kept and self._job.is_chief():
            self._take_over()
        self._is_closed = True
        for delivery in self._deliveries:
            delivery.close()
        for call in self._at_close:
            call(self)
        forks.not_at_exit(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _keep(self, row: Row) -> None:
        """Keep a row for a takeover; take the distributions from the oldest rows if there are too many."""
        self._kept.append(row)
        if not row.distributions:
            return
        self._with_distributions.append(row)
        while sum(len(each.distributions) for each in self._with_distributions) > MOST_DISTRIBUTIONS:
            self._with_distributions.popleft().distributions = NO_DISTRIBUTIONS

    def _begin(self, is_first: bool) -> None:
        """Start to deliver rows; open the sinks at the first start of the job."""
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
        """Write instead of a lost instance, which may have written some of the rows kept here."""
        self._begin(is_first=False)
        for row in self._kept:
            for delivery in self._deliveries:
                delivery.add(row)
        self._kept.clear()
        self._with_distributions.clear()


@final
class SinkDelivery:
    """The delivery of rows to one sink. Whatever happens there, `add` returns at once.

    Attributes:
        dropped: Number of rows that the sink does not get.
    """

    def __init__(self, sink: Sink, is_open: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._is_open = is_open
        self._now_s = now_s
        self._rows: deque[Row] = deque()  # waiting
        self._taken: list[Row] = []  # out of the queue, about to be written
        self._again_s = AGAIN_S
        self._not_before_s = now_s()
        self._has_failed = self._has_misread = False
        self._come = self._done = 0  # numbers of rows added, and of rows written or left out
        self._distributions_come = self._distributions_done = self._left_out = 0  # the same of distributions
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def start(self) -> None:
        """Start the thread that delivers."""
        self._thread = threading.Thread(target=self._run, name=f"metrics to {self._sink.name}", daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Queue a row, without waiting, in well under a microsecond; drop it if the queue is full."""
        if self._waiting < MOST:
            if row.distributions:
                row = self._with_room(row)
            self._rows.append(row)
            self._come += 1
        else:
            self.dropped += 1

    def _with_room(self, row: Row) -> Row:
        """Return the row; if too many distributions wait, return it without its own."""
        waiting = self._distributions_come - self._distributions_done
        if waiting + len(row.distributions) > MOST_DISTRIBUTIONS:
            self._left_out += len(row.distributions)
            return row.without_distributions()
        self._distributions_come += len(row.distributions)
        return row

    @property
    def _waiting(self) -> int:
        return self._come - self._done

    def deliver(self) -> None:
        """Deliver the waiting rows, unless the sink failed a short while ago."""
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
        except Exception as error:  # of any kind: the training goes on
            self._note(error)
            return
        self._done += len(self._taken)
        self._distributions_done += sum(len(row.distributions) for row in self._taken)
        self._taken = []
        if self._has_failed:
            self._has_failed, self._again_s = False, AGAIN_S
            logger.info("metrics are written to %s again", self._sink.name)

    def wait(self, limit_s: float) -> None:
        """Wait until the rows so far are written, the sink has failed, or `limit_s` seconds are over."""
        come, give_up_s = self._come, time.monotonic() + limit_s
        while self._done < come and not self._has_failed and time.monotonic() < give_up_s:
            time.sleep(LOOK_S)

    def close(self, limit_s: float = CLOSING_S) -> None:
        """Deliver the remaining rows, and warn of rows that the sink lacks."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                logger.warning(
                    "%s is still busy after %g s (CLOSING_S) and gets no more rows; it may lack %d rows",
                    *(self._sink.name, limit_s, self.dropped + self._waiting),
                )
                return
        else:
            self._end()
        if lacking := self.dropped + self._waiting:
            logger.warning(
                "%s lacks %d rows of metrics, because it was too slow or had failed", self._sink.name, lacking
            )
        if self._left_out:
            logger.warning(
                "%s lacks %d distributions, because more than %d (MOST_DISTRIBUTIONS) waited for it; take histograms "
                "less often",
                *(self._sink.name, self._left_out, MOST_DISTRIBUTIONS),
            )

    def _take(self, row: Row) -> None:
        """Wait until the numbers of a row are computed; leave out a row whose numbers cannot be read."""
        try:
            _ = row.values
        except Exception as error:
            self.dropped += 1
            self._done += 1
            self._distributions_done += len(row.distributions)
            if not self._has_misread:
                logger.warning("the metrics of step %d cannot be read: %s; they are left out", row.step, error)
            self._has_misread = True
        else:
            self._taken.append(row)

    def _note(self, error: Exception) -> None:
        """Close a sink that has failed, and warn the first time."""
        self._not_before_s = self._now_s() + self._again_s
        self._again_s = min(2 * self._again_s, AGAIN_AT_MOST_S)
        with suppress(Exception):
            self._sink.close()
        self._is_open = False
        if not self._has_failed:
            logger.warning(
                "metrics cannot be written to %s: %s; the training goes on, and the rows are kept for another try: %s",
                *(self._sink.name, error, self._sink.way_out),
            )
        self._has_failed = True

    def _run(self) -> None:
        while not self._ending.wait(EVERY_S):
            self.deliver()
        self._end()

    def _end(self) -> None:
        self._not_before_s = self._now_s()  # one more try, however recently it failed
        self.deliver()
        with suppress(Exception):
            if self._is_open:
                self._sink.close()


# ---- the sinks that words and environment variables name

_opened: list[Sinks] = []
_asked: dict[str, Sinks] = {}


def open_sinks(wanted: Sequence[str | Sink], job: JobFacts, environ: Mapping[str, str]) -> Sinks:
    """Open sinks. `opened` lists them until they are closed.

    Args:
        wanted: Words such as "csv:run.csv", and sinks.
        job: Facts about the job.
        environ: Environment variables, with the number of restarts.

    Returns:
        The sinks, open on the instance that writes.

    Raises:
        ValueError: A word has no meaning, or a sink cannot be opened.
    """
    job = replace(job, restarts=int(environ.get(ATTEMPT_VARIABLE, "0")))
    words = metric_words.parse_words([each for each in wanted if isinstance(each, str)])
    if job.is_chief() and not job.restarts:
        for word in words:
            if fault := metric_words.fault_of(word):
                raise ValueError(fault)
    own = [each for each in wanted if not isinstance(each, str)]
    if not words and not own:
        raise ValueError("metrics have no sink; name one, for example csv:run.csv")
    sinks = Sinks([*(sink_of(word, job, environ) for word in words), *own], job)
    _opened.append(sinks)
    sinks.at_close(_opened.remove)
    return sinks


def asked_sinks(job: JobFacts, environ: Mapping[str, str]) -> list[Sinks]:
    """Return the sinks that the environment names; a process opens them only once.

    Raises:
        EnvironmentMismatchError: The environment names an unknown sink, or one that cannot be opened.
    """
    text = environ.get(metric_words.VARIABLE)
    if not text:
        return []
    if text not in _asked:
        # Under a launcher each of several processes may have a strategy of one instance; only the chief writes.
        only_one = replace(job, is_chief=lambda: job.is_chief() and popdist.is_chief())
        try:
            _asked[text] = open_sinks([text], only_one, environ)
        except ValueError as error:
            raise EnvironmentMismatchError(f"{metric_words.VARIABLE}: {error}") from error
        _asked[text].at_close(lambda closed: _asked.pop(text))
    return [_asked[text]]


def opened() -> Sequence[Sinks]:
    """Return all open sinks of this process."""
    return tuple(_opened)


def sink_of(word: metric_words.MetricWord, job: JobFacts, environ: Mapping[str, str]) -> Sink:
    """Return the sink that a word names, not yet opened."""
    run = environ.get(metric_words.RUN_VARIABLE, "")
    if word.kind == metric_words.CSV:
        return CsvFile(word.path)
    if word.kind == metric_words.JSON_LINES:
        return JsonLines(word.path)
    if word.kind == metric_words.TENSORBOARD:
        return TensorBoard(word.path)
    if word.kind == metric_words.PROMETHEUS:
        return Prometheus(*word.address, job)
    if word.kind == metric_words.MLFLOW:
        return MlflowRun(word.target, environ.get(EXPERIMENT_VARIABLE, ""), run)
    return WandbRun(word.target, run)
