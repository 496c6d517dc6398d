"""Evaluation and prediction: the results of all replicas for every batch of a data set, merged in a fixed order.

A replica's results depend on its rows alone; which rows it gets depends on the number of replicas and the batch size.
Every instance gets the results of all replicas, and merges them replica by replica and batch by batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeAlias

from collectives import Communicator
from collectives.tree import combined
from strategies.core.carrier import Carrier
from strategies.core.data_pass import DataPass, Passing
from strategies.core.engine import Engine, Pending, State
from strategies.core.journal import Recorded
from strategies.core.members import Members
from strategies.core.metrics import tell_evaluation
from strategies.core.rows import Begun, EvaluationTask, Told, in_order
from strategies.core.survival import lost_with_an_instance, warn_of_loss
from strategies.core.weights import check_weights_of_rows
from strategies.typing import Batch, Metric, Numbers, Tree

if TYPE_CHECKING:
    from strategies.data.every_row import EveryRow
    from strategies.data.sources import Masked

EveryRowOf: TypeAlias = "Callable[[Iterable[Batch], Communicator, int], EveryRow]"
"""(data set, communicator of the instances, number of local replicas) -> the rows of the data set."""


class Evaluator(Generic[State, Pending]):
    """A runner of evaluations and predictions with a state, which stays as it is.

    Args:
        members: The instances.
        engine: The engine that computes the results.
        every_row: Function that opens a data set; see `EveryRowOf`.
        own_part: The part of the state that no other instance has, in words; None without one.
        carrier: The holder of the latest state, for instances that join.
    """

    def __init__(
        self,
        members: Members,
        engine: Engine[State, Pending],
        every_row: EveryRowOf,
        own_part: str | None,
        carrier: Carrier[State, Pending],
    ) -> None:
        self._members = members
        self._engine = engine
        self._carrier = carrier
        self._every_row = every_row
        self._survives = own_part is None
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
            tell_evaluation(self._members, state.step, found)
            return found

        def replayed(told: tuple[Mapping[str, Mergeable], int]) -> Evaluation:
            if rows.dataset is not None:
                rows.dataset.end_epoch()
            return Evaluation(*told)

        self._carrier.note(state)
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

    def told(self, task: EvaluationTask, state: State, dataset: Iterable[Batch]) -> Generator[Told, None, None]:
        """Yield a task's results for each batch on all replicas. Taking one is a collective call."""
        return self._pass(task, state, self._rows(dataset))

    def _rows(self, dataset: Iterable[Batch]) -> EveryRow:
        self._members.refuse_unknown(dataset)
        return self._every_row(dataset, self._members.communicator, len(self._members.local_replicas))

    def _pass(
        self, task: EvaluationTask, state: State, rows: EveryRow, to_all: bool = True
    ) -> Generator[Told, None, None]:
        self._carrier.note(state)
        self._members.journal.refuse(task.title)
        if not self._has_warned:
            self._has_warned = True
            warn_of_loss(self._members, lost_with_an_instance(False, rows.dataset))
        self._members.instruments.step_begins(state.step)
        passing = Passing(task.title, state.step, partial(self._tell, task, state), self._survives)
        return DataPass(self._members, passing, rows, to_all).results()

    def _tell(self, task: EvaluationTask, state: State, batch: Masked) -> Begun:
        return self._engine.tell(task, self._carrier.read(state), batch)


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


def _evaluation_of(batches: Generator[Told, None, None]) -> Evaluation:
    """Merge the metrics of all batches, replica by replica and batch by batch.

    Raises:
        ValueError: If there is no row.
    """
    merged: dict[str, Mergeable] = {}
    rows = 0
    with closing(batches):
        for told in batches:
            rows += sum(int(one.mask.sum()) for one in told)
            of_batch = combined([one.tree for one in told], _merged)
            merged = _merged(merged, of_batch) if merged else of_batch
    if not rows:
        raise ValueError("there is no row to evaluate")
    loss_first = sorted(merged, key=lambda name: name != "loss")
    return Evaluation({name: merged[name] for name in loss_first}, rows)


def _merged(one: dict[str, Mergeable], other: dict[str, Mergeable]) -> dict[str, Mergeable]:
    return {name: metric.merge(other[name]) for name, metric in one.items()}


def _predictions_of(batches: Generator[Told, None, None], is_interleaved: bool) -> Generator[Tree, None, None]:
    """Yield the predictions of each batch; None on instances that get none."""
    with closing(batches):
        for told in batches:
            yield in_order(told, is_interleaved)
