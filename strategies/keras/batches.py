"""Sources that come in batches, dealt out to replicas: batch r + s R of a source is what replica r takes in step s.

With accumulation it is batches (s R + r) N to (s R + r) N + N - 1. Where the last batches do not fill a step, or have
other numbers of rows, all their rows together are dealt out: equally many for each replica in training, and every one
of them, block by block, where nothing is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import jax
import numpy as np

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
    """Return the rows of the local replicas of a batch for all replicas and micro-batches, placed for a step.

    Raises:
        ValueError: if the rows cannot be divided.
    """
    replicas, rows = strategy.num_replicas_in_sync, rows_of(batch)
    if rows % (replicas * accumulated):
        raise ValueError(
            f"a batch of {rows} rows for {replicas} replicas x {accumulated} micro-batches; its rows must be a "
            f"multiple of {replicas * accumulated}"
        )
    local, each = strategy.replicas.local_replicas, rows // replicas
    own = jax.tree.map(lambda leaf: leaf[local.start * each : local.stop * each], batch)
    return strategy.replicas.dealing.batch(own)


@final
@dataclass(frozen=True)
class NumberedBatches(SourceFactory):
    """Batches that can be read by their numbers, of which each instance reads those of its replicas.

    Attributes:
        read: reads one.
        count: how many there are.
    """

    read: Read
    count: int

    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        """See `SourceFactory`."""
        return _Numbered(self, layout, seed, shuffle)


@final
@dataclass(frozen=True)
class StreamOfBatches(SourceFactory):
    """Batches that come one after another; every instance goes through all of them.

    Attributes:
        begin: begins anew, or goes on where there is no beginning.
        count: how many there are; None where nobody knows.
    """

    begin: Callable[[], Iterable[Batch]]
    count: int | None = None

    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        """See `SourceFactory`."""
        return _Stream(self, layout)


@dataclass
class _Dealer:
    """A dealer of the batches of a step, with the number of the first row of the next one."""

    layout: Layout
    first_row: int = 0

    @property
    def per_step(self) -> int:
        """The number of batches that a step takes."""
        return self.layout.total_replicas * self.layout.gradient_accumulation_count

    @property
    def own(self) -> range:
        """The places of those batches that are for the local replicas."""
        count, local = self.layout.gradient_accumulation_count, self.layout.local_replicas
        return range(local[0] * count, (local[-1] + 1) * count)

    def dealt(self, batches: Sequence[Batch]) -> Batch | None:
        """Return what local replicas take of all batches of a step; None where it is not enough."""
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
        """Return what local replicas take, given their batches of a step that is filled."""
        values = _joined(own)
        if not self.layout.pads:
            return values
        first = self.first_row + self.own.start * self.layout.batch_size
        self.first_row += self.layout.global_batch_size
        rows = rows_of(values)
        return Masked((np.arange(first, first + rows, dtype=np.int32), values), np.ones(rows, bool))


@final
class _Numbered(DataSource):
    """See `NumberedBatches`. The last one may have fewer rows than the others."""

    is_random_access = True
    length: int | None = None

    def __init__(self, given: NumberedBatches, layout: Layout, seed: int, shuffle: bool) -> None:
        self.steps: int = layout.steps(given.count * layout.batch_size)
        self._layout = layout
        self._given = given
        self._seed = seed
        self._shuffle = shuffle
        self._last_rows = rows_of(given.read(given.count - 1))

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
    """See `StreamOfBatches`."""

    length: int | None = None

    def __init__(self, given: StreamOfBatches, layout: Layout) -> None:
        self.steps = None if given.count is None else layout.steps(given.count * layout.batch_size)
        self._layout = layout
        self._given = given

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
        ValueError: if their rows are not alike.
    """
    if len(batches) == 1:
        return batches[0]
    kinds = {str(jax.tree.map(lambda leaf: leaf.shape[1:], batch)) for batch in batches}
    if len(kinds) > 1:
        raise ValueError(
            f"batches of one step have rows of the shapes {' and '.join(sorted(kinds))}, and its replicas compute one "
            "program; pad them to the same length, those of a step at least"
        )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
