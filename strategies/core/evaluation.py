"""Evaluation and prediction: the results of all replicas for every batch of a data set, merged in a fixed order.

A replica's results depend on its rows alone; which rows it gets depends on the number of replicas and the batch size.
Every instance gets the results of all replicas, and merges them replica by replica and batch by batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeAlias

import numpy as np

from collectives import Communicator
from collectives.tree import combined
from popdist.switches import require_switches
from strategies.core.agreement import Members, gather_arrays, gather_arrays_on_first
from strategies.core.engine import Engine, EvaluationTask, Pending, PendingBatch, Results, RowResults, State, in_order
from strategies.core.journal import Recorded
from strategies.core.metrics import report_evaluation
from strategies.core.options import check_weights_of_rows
from strategies.core.survival import StateTransfer, lost_with_an_instance, meet, surviving, warn_of_loss
from strategies.errors import StrategyError
from strategies.typing import Batch, Metric, Numbers, Tree

if TYPE_CHECKING:
    from strategies.data.every_row import EveryRow
    from strategies.data.sources import Masked


_ELSEWHERE: Results = [RowResults((), lambda leaves: None, np.zeros(0, np.bool_))]
"""The empty results on an instance other than 0, if instance 0 alone gets the results."""


@dataclass(frozen=True)
class PassOptions:
    """The rules of a pass through a data set.

    Attributes:
        title: The name of the work, for messages.
        step: The number of steps that made the state, for messages.
        begin_task: Function that begins to compute a batch; see `Engine.begin_task`.
        survives: Whether the other instances can go on without a lost instance.
    """

    title: str
    step: int
    begin_task: Callable[[Masked], PendingBatch]
    survives: bool


class DataPass:
    """A pass through the rest of a data set, by all instances together.

    Args:
        members: The instances.
        options: The rules of the pass.
        rows: The rows of the data set.
        to_all: Whether all instances get the results, or instance 0 alone.
    """

    def __init__(self, members: Members, options: PassOptions, rows: EveryRow, to_all: bool = True) -> None:
        require_switches(to_all=to_all)
        self._members = members
        self._options = options
        self._rows = rows
        self._to_all = to_all
        self._batches = rows.batches(0)
        self._pending: deque[PendingBatch] = deque()
        self._number = 0  # number of the oldest batch in `_pending`
        self._ahead = 0
        self._is_at_end = False

    def results(self) -> Generator[Results, None, None]:
        """Yield the results of all replicas for each batch. Collective. After an error no replica computes any more."""
        done = 0
        try:
            while results := self._next(done):
                done += 1
                yield results
        finally:
            self._stop()
            self._members.done_so_far.passes += 1
            self._members.done_so_far.batches = 0
            if not self._is_at_end:
                self._rows.leave(done)

    def _next(self, done: int) -> Results:
        """Return the results of batch number `done`, counted from 0; an empty list after the last batch."""
        self._members.done_so_far.batches = done
        if not self._options.survives:
            return self._computed(done)
        return surviving(self._members, lambda: self._computed(done), lambda: self._catch_up(done))  # part of a pass

    def _computed(self, done: int) -> Results:
        while True:
            self._begin()
            title = f"{self._options.title} at step {self._options.step}"
            if not self._pending:
                self._is_at_end = True
                self._members.communicator.barrier(name=f"end of {title}")
                return []
            local = self._pending.popleft().wait()
            gather = gather_arrays if self._to_all else gather_arrays_on_first
            arrays = [[*one.leaves, one.mask] for one in local]
            found = gather(self._members, arrays, f"{title}, batch {self._number}")
            self._number += 1
            if self._number > done:
                return _ELSEWHERE if found is None else [RowResults(of, local[0].build, mask) for *of, mask in found]

    def _begin(self) -> None:
        """Begin batches in advance, so that no replica waits for this thread; the engine says how many."""
        while len(self._pending) <= self._ahead:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._pending.append(self._options.begin_task(batch))
            self._ahead = self._pending[-1].ahead

    def _catch_up(self, done: int) -> Results | None:
        """Prepare to go on after a loss: return None to repeat from the first batch that an instance lacks.

        Return an empty list if other instances have ended the pass, and this instance has reached its end too.
        """
        self._stop()
        meeting, own = meet(self._members), self._members.done_so_far.passes
        if meeting.passes.max() > own:
            if not self._is_at_end:
                raise StrategyError(
                    f"an instance is lost, and others have left the {self._options.title} after {done} batches; take "
                    "all batches that predict yields"
                )
            return []
        self._is_at_end = False
        self._number = int(np.where(meeting.passes == own, meeting.batches, 0).min())
        self._batches = self._rows.batches(self._number)
        return None

    def _stop(self) -> None:
        """Drop the batches that were begun, after their replicas have ended."""
        self._batches.close()
        while self._pending:
            with suppress(Exception):  # no caller waits for this result
                self._pending.popleft().wait()


EveryRowOf: TypeAlias = "Callable[[Iterable[Batch], Communicator, int], EveryRow]"
"""(data set, communicator of the instances, number of local replicas) -> the rows of the data set."""


class Evaluator(Generic[State, Pending]):
    """A runner of evaluations and predictions with a state, which stays as it is.

    Args:
        members: The instances.
        engine: The engine that computes the results.
        every_row: Function that opens a data set; see `EveryRowOf`.
        unrecoverable_part: Name of the part of the state that is lost with an instance, for messages; None without one.
        transfer: The transfer of the latest state to instances that join.
    """

    def __init__(
        self,
        members: Members,
        engine: Engine[State, Pending],
        every_row: EveryRowOf,
        unrecoverable_part: str | None,
        transfer: StateTransfer[State, Pending],
    ) -> None:
        self._members = members
        self._engine = engine
        self._transfer = transfer
        self._every_row = every_row
        self._survives = unrecoverable_part is None
        self._has_warned = False

    def evaluate(self, task: EvaluationTask, state: State, dataset: Iterable[Batch]) -> Evaluation:
        """Return the merged metrics of all rows, and hand them to sinks; see `Trainer.evaluate`.

        Args:
            task: Task that computes metrics by their names.
            state: The state of the training.
            dataset: The data set; each of its rows counts once.
        """
        rows = self._rows(dataset)

        def evaluated() -> Evaluation:
            found = _evaluation_of(self._pass(task, state, rows))
            check_weights_of_rows(task.sums_of_weights(found.merged))
            report_evaluation(self._members, state.step, found)
            return found

        def replayed(results: tuple[Mapping[str, Mergeable], int]) -> Evaluation:
            if rows.dataset is not None:
                rows.dataset.end_epoch()
            return Evaluation(*results)

        self._transfer.note(state)
        recorded = Recorded[Evaluation](task.title, lambda found: lambda: (dict(found.merged), found.rows), replayed)
        return self._members.journal.perform(recorded, evaluated)

    def predict(
        self, task: EvaluationTask, state: State, dataset: Iterable[Batch], to_all: bool
    ) -> Generator[Tree, None, None]:
        """Yield the outputs for the rows of each batch, in the order of the data; see `Trainer.predict`.

        Args:
            task: Task that computes an output for each row.
            state: The state of the training.
            dataset: The data set, in the order of the outputs.
            to_all: Whether all instances get the outputs; if not, all but instance 0 get None.

        Raises:
            ValueError: If the data set is shuffled.
        """
        rows = self._rows(dataset)
        if rows.dataset is not None and rows.dataset.is_shuffled:
            raise ValueError(
                "the data set is shuffled, but predictions come in the order of the data; distribute it with "
                "shuffle=False"
            )
        return _predictions_of(self._pass(task, state, rows, to_all), rows.is_interleaved)

    def batch_results(
        self, task: EvaluationTask, state: State, dataset: Iterable[Batch]
    ) -> Generator[Results, None, None]:
        """Yield a task's results for each batch on all replicas. Taking one is a collective call."""
        return self._pass(task, state, self._rows(dataset))

    def _rows(self, dataset: Iterable[Batch]) -> EveryRow:
        self._members.check_known_batches(dataset)
        return self._every_row(dataset, self._members.communicator, len(self._members.local_replicas))

    def _pass(
        self, task: EvaluationTask, state: State, rows: EveryRow, to_all: bool = True
    ) -> Generator[Results, None, None]:
        self._transfer.note(state)
        self._members.journal.begin_unrepeatable(task.title)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(self._members, lost_with_an_instance(False, rows.dataset))
        self._members.instruments.step_begins(state.step)

        def begin_task(batch: Masked) -> PendingBatch:
            return self._engine.begin_task(task, self._transfer.read(state), batch)

        options = PassOptions(task.title, state.step, begin_task, self._survives)
        return DataPass(self._members, options, rows, to_all).results()


class Mergeable(Protocol):
    """A metric of some rows, as a pytree of arrays, which can be merged with the same metric of other rows."""

    def merge(self, other: Self) -> Self:
        """Return the metric of all rows of both metrics; both stay unchanged."""


class ReadAsValue(ABC):
    """A metric that `Evaluation` shows to users as its value."""

    @property
    @abstractmethod
    def value(self) -> Numbers:
        """The value: a float, or an array of float64."""


class Evaluation(Mapping[str, Metric]):
    """The result of `Trainer.evaluate`, the same bits on every instance: a mapping of names to metrics.

    A metric that is a `Mean` appears as its value. Any other metric appears as it was merged.

    Example::

        evaluation = trainer.evaluate(state, test)
        evaluation["loss"], evaluation["accuracy"], evaluation.rows

    Attributes:
        merged: The merged metrics by name, which can be merged further.
        rows: The number of rows that were evaluated.
    """

    def __init__(self, merged: Mapping[str, Mergeable], rows: int) -> None:
        self.merged = merged
        self.rows = rows

    def __getitem__(self, name: str) -> Metric:
        metric = self.merged[name]
        return metric.value if isinstance(metric, ReadAsValue) else metric

    def __iter__(self) -> Iterator[str]:
        return iter(self.merged)

    def __len__(self) -> int:
        return len(self.merged)

    def __repr__(self) -> str:
        return f"Evaluation({dict(self)}, rows={self.rows})"


def _evaluation_of(batches: Generator[Results, None, None]) -> Evaluation:
    """Merge the metrics of all batches, replica by replica and batch by batch.

    Raises:
        ValueError: If there is no row.
    """
    merged: dict[str, Mergeable] = {}
    rows = 0
    with closing(batches):
        for results in batches:
            rows += sum(int(one.mask.sum()) for one in results)
            of_batch = combined([one.tree for one in results], _merged)
            merged = _merged(merged, of_batch) if merged else of_batch
    if not rows:
        raise ValueError("there is no row to evaluate")
    loss_first = sorted(merged, key=lambda name: name != "loss")
    return Evaluation({name: merged[name] for name in loss_first}, rows)


def _merged(one: dict[str, Mergeable], other: dict[str, Mergeable]) -> dict[str, Mergeable]:
    return {name: metric.merge(other[name]) for name, metric in one.items()}


def _predictions_of(batches: Generator[Results, None, None], is_interleaved: bool) -> Generator[Tree, None, None]:
    """Yield the predictions of each batch; None on instances that get none."""
    with closing(batches):
        for results in batches:
            yield in_order(results, is_interleaved)
