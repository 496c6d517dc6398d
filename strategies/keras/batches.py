"""Sources that come in batches: replica r takes batch r + s R of the source in step s.

With accumulation of N it takes batches (s R + r) N to (s R + r) N + N - 1. If the last batches do not fill a step, or
have other numbers of rows, their rows are joined and split among the replicas. In training each replica gets the same
number of rows; without training all rows are used, block by block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import jax
import numpy as np
from typing_extensions import override

from strategies.data.layout import Layout, epoch_order
from strategies.data.sources import DataSource, Masked, SourceFactory
from strategies.strategy import Strategy
from strategies.typing import Batch

Read = Callable[[int], Batch]


def rows_of(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    rows: int = jax.tree.leaves(batch)[0].shape[0]
    return rows


def own_rows(strategy: Strategy, batch: Batch, accumulated: int) -> Batch:
    """Return the local replicas' rows of a batch for all replicas and micro-batches, placed for a step.

    Raises:
        ValueError: If the replicas and micro-batches do not divide the rows evenly.
    """
    replicas, rows = strategy.num_replicas_in_sync, rows_of(batch)
    if rows % (replicas * accumulated):
        raise ValueError(
            f"a batch of {rows} rows cannot be split among {replicas} replicas x {accumulated} micro-batches; its rows "
            f"must be a multiple of {replicas * accumulated}"
        )
    local, each = strategy.replicas.local_replicas, rows // replicas
    own = jax.tree.map(lambda leaf: leaf[local.start * each : local.stop * each], batch)
    return strategy.replicas.dealing.batch(own)


@final
@dataclass(frozen=True)
class NumberedBatches(SourceFactory):
    """Batches that can be read by their numbers; each instance reads the batches of its replicas.

    Attributes:
        read: Function that reads a batch by its number.
        count: Number of batches.
    """

    read: Read
    count: int

    @override
    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        return _Numbered(self, layout, seed, shuffle)


@final
@dataclass(frozen=True)
class StreamOfBatches(SourceFactory):
    """Batches that come one after another; every instance iterates over all of them.

    Attributes:
        begin: Function that starts again from the beginning, or goes on if the source cannot start again.
        count: Number of batches; None if unknown.
    """

    begin: Callable[[], Iterable[Batch]]
    count: int | None = None

    @override
    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        return _Stream(self, layout)


@dataclass
class _Dealer:
    """The division of each step's batches among replicas, with the number of the next step's first row."""

    layout: Layout
    first_row: int = 0

    @property
    def per_step(self) -> int:
        """The number of batches in a full step."""
        return self.layout.total_replicas * self.layout.gradient_accumulation_count

    @property
    def own(self) -> range:
        """The places of the local replicas' batches in a step."""
        count, local = self.layout.gradient_accumulation_count, self.layout.local_replicas
        return range(local[0] * count, (local[-1] + 1) * count)

    def dealt(self, batches: Sequence[Batch]) -> Batch | None:
        """Return the local replicas' part of all batches of a step; None if the rows are too few."""
        if len(batches) == self.per_step and {rows_of(batch) for batch in batches} == {self.layout.batch_size}:
            return self.of_even([batches[number] for number in self.own])
        rows = _joined(batches)
        given = rows_of(rows)
        positions = self.layout.positions(0, given)
        take = np.minimum(positions, given - 1)
        values = jax.tree.map(lambda leaf: leaf[take], rows)
        if not self.layout.pads:
            return values if positions.size else None
        numbers = (self.first_row + take).astype(np.int32)
        self.first_row += given
        return Masked((numbers, values), positions < given)

    def of_even(self, own: Sequence[Batch]) -> Batch:
        """Return the local replicas' part of a full step, given their batches."""
        values = _joined(own)
        if not self.layout.pads:
            return values
        first = self.first_row + self.own.start * self.layout.batch_size
        self.first_row += self.layout.global_batch_size
        rows = rows_of(values)
        return Masked((np.arange(first, first + rows, dtype=np.int32), values), np.ones(rows, bool))


@final
class _Numbered(DataSource):
    """The source of `NumberedBatches`. The last batch may have fewer rows than the others."""

    is_random_access = True
    length: int | None = None

    def __init__(self, given: NumberedBatches, layout: Layout, seed: int, shuffle: bool) -> None:
        self.steps: int = layout.steps(given.count * layout.batch_size)
        self._layout = layout
        self._given = given
        self._seed = seed
        self._shuffle = shuffle
        self._last_rows = rows_of(given.read(given.count - 1))

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        dealer = _Dealer(self._layout, start * self._layout.global_batch_size)
        order, per_step = epoch_order(self._given.count, self._seed, epoch, shuffle=self._shuffle), dealer.per_step
        for step in range(start, self.steps):
            numbers = [int(number) for number in order[step * per_step : (step + 1) * per_step]]
            has_last = self._given.count - 1 in numbers and self._last_rows != self._layout.batch_size
            if len(numbers) == per_step and not has_last:
                yield dealer.of_even([self._given.read(numbers[place]) for place in dealer.own])
            elif (batch := dealer.dealt([self._given.read(number) for number in numbers])) is not None:
                yield batch


@final
class _Stream(DataSource):
    """The source of `StreamOfBatches`."""

    length: int | None = None

    def __init__(self, given: StreamOfBatches, layout: Layout) -> None:
        self.steps = None if given.count is None else layout.steps(given.count * layout.batch_size)
        self._layout = layout
        self._given = given

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        dealer = _Dealer(self._layout)
        batches = iter(self._given.begin())
        for step in itertools.count():
            taken = list(itertools.islice(batches, dealer.per_step))
            if not taken:
                return
            if step < start:
                dealer.first_row += sum(map(rows_of, taken))
            elif (batch := dealer.dealt(taken)) is not None:
                yield batch
            else:
                return


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return the rows of several batches, one after another.

    Raises:
        ValueError: If rows have different shapes.
    """
    if len(batches) == 1:
        return batches[0]
    kinds = {str(jax.tree.map(lambda leaf: leaf.shape[1:], batch)) for batch in batches}
    if len(kinds) > 1:
        raise ValueError(
            f"batches of one step have rows of the shapes {' and '.join(sorted(kinds))}, but its replicas compute one "
            "program; pad them to the same length, at least within a step"
        )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
