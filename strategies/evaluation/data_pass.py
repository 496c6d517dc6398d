"""Going through a data set once where nothing is trained: what all replicas tell of every batch, in a fixed order.

What is found out about rows in parts is merged in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from collectives.tree import combined
from popdist.switches import require_switches
from strategies.core.survival import SurvivorMeeting, surviving
from strategies.data.every_row import EveryRow
from strategies.data.sources import Masked
from strategies.errors import StrategyError
from strategies.replicas.gathering import gather_replicas, gather_replicas_on_first
from strategies.replicas.replicas import Replicas
from strategies.typing import Metric, Numbers, Tree

Told = list[tuple[Tree, np.ndarray]]
"""For each replica what it tells of a batch, and its mask."""

_ELSEWHERE: Told = [(None, np.zeros(0, np.bool_))]
"""What an instance is told of a batch of which another one is told everything."""
AHEAD = 2
"""Batches that are begun before what the first of them says is asked for."""


@dataclass(frozen=True)
class Begun:
    """A batch that is being computed.

    Attributes:
        wait: returns what the local replicas tell of it.
        ahead: how many more may be begun before it is waited for.
    """

    wait: Callable[[], Told]
    ahead: int = 0


@dataclass(frozen=True)
class Passing:
    """How an engine goes through a data set.

    Attributes:
        title: what is done, for messages.
        step: with whose state.
        begin: begins to compute a batch; a collective call where it is the first one of its shapes.
        check: raises if the state was used up.
        meet: after a loss, see `membership.meet`; None where the others cannot go on.
    """

    title: str
    step: int
    begin: Callable[[Masked], Begun]
    check: Callable[[], None]
    meet: Callable[[], SurvivorMeeting] | None


class DataPass:
    """Goes through the rest of a data set once, with all instances that there are."""

    def __init__(self, replicas: Replicas, passing: Passing, rows: EveryRow, to_all: bool = True) -> None:
        require_switches(to_all=to_all)
        self._replicas = replicas
        self._passing = passing
        self._rows = rows
        self._to_all = to_all
        self._batches = rows.batches(0)
        self._begun: deque[Begun] = deque()
        self._number = 0  # of the oldest batch that was begun
        self._ahead = 0
        self._is_at_end = False

    def results(self) -> Generator[Told, None, None]:
        """Yield each batch's metrics and masks of all replicas, in their order. Collective."""
        done = 0
        try:
            while told := self._surviving(done):
                done += 1
                yield told
        finally:
            self._stop()
            self._replicas.done_so_far.passes += 1
            self._replicas.done_so_far.batches = 0
            if not self._is_at_end:
                self._rows.leave(done)

    def _surviving(self, done: int) -> Told:
        self._replicas.done_so_far.batches = done
        if self._passing.meet is None:
            return self._next(done)
        return surviving(self._replicas, lambda: self._next(done), lambda: self._catch_up(done))

    def _next(self, done: int) -> Told:
        """What is told of the batch that comes after so many; nothing behind the last one."""
        while True:
            self._passing.check()
            self._begin()
            title = f"{self._passing.title} at step {self._passing.step}"
            if not self._begun:
                self._is_at_end = True
                self._replicas.communicator.barrier(name=f"end of {title}")
                return []
            local = self._begun.popleft().wait()
            told = self._gather(local, f"{title}, batch {self._number}")
            self._number += 1
            if self._number > done:
                return told

    def _begin(self) -> None:
        """Have so many batches computed that no replica waits for this thread."""
        while len(self._begun) <= self._ahead:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._begun.append(self._passing.begin(batch))
            self._ahead = self._begun[-1].ahead

    def _gather(self, local: Told, name: str) -> Told:
        if self._to_all:
            return gather_replicas(self._replicas, local, name)
        found = gather_replicas_on_first(self._replicas, local, name)
        return _ELSEWHERE if found is None else found

    def _catch_up(self, done: int) -> Told | None:
        """After a loss: nothing where others are through, else None, and it goes on with what an instance has not got.

        Who is through has met all others at the end, where they have got everything.
        """
        assert self._passing.meet is not None
        self._stop()
        meeting, own = self._passing.meet(), self._replicas.done_so_far.passes
        if meeting.passes.max() > own:
            if not self._is_at_end:
                raise StrategyError(
                    f"an instance is lost, and others have left the {self._passing.title} after {done} batches; take "
                    "all batches that predict gives"
                )
            return []
        self._is_at_end = False
        self._number = int(np.where(meeting.passes == own, meeting.batches, 0).min())
        self._batches = self._rows.batches(self._number)
        return None

    def _stop(self) -> None:
        """Give up what was begun, once no replica computes any more."""
        self._batches.close()
        while self._begun:
            with suppress(Exception):  # nobody has asked for it
                self._begun.popleft().wait()


def evaluation_of(batches: Generator[Told, None, None]) -> Evaluation:
    """Merge the metrics of all batches, replica by replica and batch by batch.

    Raises:
        ValueError: if there is no row.
    """
    merged: dict[str, Mergeable] = {}
    rows = 0
    with closing(batches):
        for told in batches:
            rows += sum(int(mask.sum()) for _, mask in told)
            of_batch = combined([metrics for metrics, _ in told], _merged)
            merged = _merged(merged, of_batch) if merged else of_batch
    if not rows:
        raise ValueError("there is no row to evaluate")
    in_order = sorted(merged, key=lambda name: name != "loss")  # the loss first
    return Evaluation({name: merged[name] for name in in_order}, rows)


def predictions_of(batches: Generator[Told, None, None], is_interleaved: bool) -> Generator[Tree, None, None]:
    """Yield the predictions of each batch, in the data set's order; None on instances that get none."""
    with closing(batches):
        for of_replicas in batches:
            yield None if of_replicas is _ELSEWHERE else in_order(of_replicas, is_interleaved)


def _merged(one: dict[str, Mergeable], other: dict[str, Mergeable]) -> dict[str, Mergeable]:
    return {name: metric.merge(other[name]) for name, metric in one.items()}


def in_order(of_replicas: Told, is_interleaved: bool) -> Tree:
    """The rows that count of what replicas predict, in the order of the data set."""
    trees, masks = zip(*of_replicas, strict=True)

    def ordered(arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.stack(arrays, axis=1 if is_interleaved else 0)
        return whole.reshape(-1, *arrays[0].shape[1:])

    counts = ordered(masks)
    return jax.tree.map(lambda *leaves: ordered(leaves)[counts], *trees)


class Mergeable(Protocol):
    """A metric of some rows, as a pytree of arrays; that of more rows is merged from several."""

    def merge(self, other: Self) -> Self:
        """The metric of the rows of both; neither is changed."""


@partial(jax.tree_util.register_dataclass, data_fields=["total", "count"], meta_fields=[])
@dataclass(frozen=True)
class Mean:
    """A mean that is merged exactly, because it is kept as a sum and a count.

    Attributes:
        total: the sum of what is averaged, of any shape. Once it has left the replica it is float64.
        count: of how many numbers it is the sum, or of which weights: a scalar, or of the shape of the total. Likewise.
    """

    total: Numbers
    count: Numbers

    @classmethod
    def of(cls, values: Numbers, weights: Numbers) -> Mean:
        """The mean of rows; traceable.

        Args:
            values: floating-point numbers, bools or integers `[rows, ...]`.
            weights: `[rows]`: a mask, or numbers. A row of weight 0 may have any value, NaN too.
        """
        values, weights = jnp.asarray(values, jnp.float32), jnp.asarray(weights, jnp.float32)
        of_rows = weights.reshape(-1, *[1] * (values.ndim - 1))
        return cls(jnp.where(of_rows == 0, 0, values * of_rows).sum(0), weights.sum())

    def merge(self, other: Mean) -> Mean:
        """The mean over the numbers of both."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Numbers:
        """The mean: a float, or a float64 array of the shape of the total; NaN where there is nothing to average."""
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = np.divide(self.total, self.count)
        return quotient if quotient.ndim else float(quotient)

    def widened(self) -> Mean:
        """The same in float64, in which sums of a replica's rows are added."""
        return Mean(np.asarray(self.total, np.float64), np.asarray(self.count, np.float64))


class Evaluation(Mapping[str, Metric]):
    """What `Trainer.evaluate` has found, the same bits on every instance.

    Under its name each metric that is a `Mean` is its value, and any other what was merged.

    Attributes:
        merged: the metrics as they were merged, to be merged further.
        rows: how many rows were evaluated.
    """

    def __init__(self, merged: Mapping[str, Mergeable], rows: int) -> None:
        self.merged = merged
        self.rows = rows

    def __getitem__(self, name: str) -> Metric:
        metric = self.merged[name]
        return metric.value if isinstance(metric, Mean) else metric

    def __iter__(self) -> Iterator[str]:
        return iter(self.merged)

    def __len__(self) -> int:
        return len(self.merged)

    def __repr__(self) -> str:
        return f"Evaluation({dict(self)}, rows={self.rows})"
