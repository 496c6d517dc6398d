"""Batches for a Keras model: arrays, sources in batches, and all other data, split among replicas.

With accumulation of N it takes batches (s R + r) N to (s R + r) N + N - 1. If the last batches do not fill a step, or
have other numbers of rows, their rows are joined and split among the replicas. In training each replica gets the same
number of rows; without training all rows are used, block by block.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias, final

import jax
import numpy as np
from keras.utils import PyDataset, unpack_x_y_sample_weight
from typing_extensions import override

from strategies.argument_checks import positive
from strategies.core.engine import Results
from strategies.data.datasets import DistributedDataset
from strategies.data.layout import Layout, epoch_order
from strategies.data.sources import DataSource, Masked, SourceFactory
from strategies.keras.patches import (
    ArrayDataAdapter,
    DataAdapter,
    PyDatasetAdapter,
    can_convert_arrays,
    get_data_adapter,
)
from strategies.strategy import Strategy
from strategies.typing import Batch, Data, Tree

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
    return strategy.replicas.sharding.batch(own)


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
class _StepSharding:
    """The assignment of each step's batches to replicas, with the number of the next step's first row."""

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

    def shard(self, batches: Sequence[Batch]) -> Batch | None:
        """Return the local replicas' part of all batches of a step; None if the rows are too few."""
        if len(batches) == self.per_step and {rows_of(batch) for batch in batches} == {self.layout.batch_size}:
            return self.shard_full_step([batches[number] for number in self.own])
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

    def shard_full_step(self, own: Sequence[Batch]) -> Batch:
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
        sharding = _StepSharding(self._layout, start * self._layout.global_batch_size)
        order, per_step = epoch_order(self._given.count, self._seed, epoch, shuffle=self._shuffle), sharding.per_step
        for step in range(start, self.steps):
            numbers = [int(number) for number in order[step * per_step : (step + 1) * per_step]]
            has_last = self._given.count - 1 in numbers and self._last_rows != self._layout.batch_size
            if len(numbers) == per_step and not has_last:
                yield sharding.shard_full_step([self._given.read(numbers[place]) for place in sharding.own])
            elif (batch := sharding.shard([self._given.read(number) for number in numbers])) is not None:
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
        sharding = _StepSharding(self._layout)
        batches = iter(self._given.begin())
        for step in itertools.count():
            taken = list(itertools.islice(batches, sharding.per_step))
            if not taken:
                return
            if step < start:
                sharding.first_row += sum(map(rows_of, taken))
            elif (batch := sharding.shard(taken)) is not None:
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


Hooks: TypeAlias = tuple[Callable[[], object], Callable[[], object]]
Shuffle: TypeAlias = bool | int | str | None
"""The order of rows or batches, as `fit` takes it."""

DEFAULT_BATCH_SIZE = 32
COMPARED_BYTES = 4 << 20
"""The most bytes of arrays that instances compare before training; the comparison takes about 10 ms."""
_NO_HOOKS: Hooks = (lambda: None, lambda: None)


@dataclass(frozen=True)
class DataArguments:
    """The data arguments of Keras's `fit`, `evaluate` and `predict`.

    Attributes:
        x: Inputs, or a source of whole batches.
        y: Targets.
        sample_weight: Weights of rows.
        class_weight: Weights of classes.
        batch_size: Rows per replica and micro-batch.
        steps: Steps of an epoch.
    """

    x: Data
    y: Data = None
    sample_weight: Data = None
    class_weight: Mapping[int, float] | None = None
    batch_size: int | None = None
    steps: int | None = None


class KerasFeed(DataAdapter):
    """A data adapter for Keras's loops, with one batch of the local replicas for each global step.

    Attributes:
        dataset: Data set of the strategy.
        example: Batch of the source, of any size.
        compared: Rows that all instances must have in common.
        epoch: Number of the next epoch.
        current: Pass that Keras's loop reads now, maybe through its own iterators.
    """

    def __init__(self, dataset: DistributedDataset, example: Batch, compared: Batch, hooks: Hooks = _NO_HOOKS) -> None:
        self.dataset = dataset
        self.example = example
        self.compared = compared
        self.epoch = 0
        self._hooks = hooks
        self._is_in_epoch = False
        self.current = FeedEpoch(self)

    @property
    def num_batches(self) -> int | None:
        """The number of steps of an epoch; None if unknown."""
        try:
            return len(self.dataset)
        except TypeError:
            return None

    @property
    def batch_size(self) -> int:
        """The number of rows of all replicas in a step."""
        return self.dataset.global_batch_size

    @property
    def has_partial_batch(self) -> bool:
        """False: Keras need not pad, because batches are padded here."""
        return False

    partial_batch_size = None

    def get_jax_iterator(self) -> FeedEpoch:
        """Return the batches of the next epoch."""
        self.current.end()
        self.current = FeedEpoch(self)
        return self.current

    def begin_with(self, epoch: int) -> None:
        """Let the next pass read the given epoch."""
        self.epoch = epoch

    def next_epoch(self) -> int:
        """Return the number of the epoch that a pass begins to read."""
        self.epoch += 1
        return self.epoch - 1

    def on_epoch_begin(self) -> None:
        """Call the source's hook once per epoch; Keras may call this more often."""
        if not self._is_in_epoch:
            self._is_in_epoch = True
            self._hooks[0]()

    def on_epoch_end(self) -> None:
        """Call the source's hook once per epoch; Keras may call this more often."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            self._hooks[1]()


class FeedEpoch(Iterator[Batch]):
    """One epoch of a feed: training reads its batches, and evaluation and prediction read their results.

    The number of the epoch is chosen at the first read. With `steps_per_epoch`, Keras's loop makes the next pass at the
    end of an epoch, before the number of the next epoch is known.

    Attributes:
        feed: Feed of the epoch.
    """

    def __init__(self, feed: KerasFeed) -> None:
        self.feed = feed
        self._batches: Iterator[Batch] | None = None
        self._results: Generator[Results, None, None] | None = None
        self._taken = 0

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self.feed.dataset.epoch(self.feed.next_epoch()))
        return next(self._batches)

    def batch_results(self, begin: Callable[[DistributedDataset], Generator[Results, None, None]]) -> Iterator[Results]:
        """Yield the results of the next batches; `begin` starts the generator of a whole epoch's results."""
        if self._results is None:
            dataset = self.feed.dataset
            dataset.restore(replace(dataset.position(), epoch=self.feed.next_epoch(), step=0))
            self._results = begin(dataset)
        for results in self._results:
            self._taken += 1
            yield results
            if self._taken == self.feed.num_batches:  # read on, to meet the other instances at the end
                self._results = (one for one in list(self._results))

    def end(self) -> None:
        """Leave the pass, at any position."""
        if self._results is not None:
            self._results.close()


def open_feed(
    given: DataArguments,
    strategy: Strategy,
    *,
    trains: bool,
    shuffle: Shuffle = False,
    seed: int = 0,
    accumulated: int = 1,
    prefetch: int = 2,
) -> KerasFeed:
    """Return the feed for the data given to `fit`, `evaluate` or `predict`.

    Args:
        given: Data arguments of Keras.
        strategy: Strategy whose replicas use the feed.
        trains: Whether the batches are for training; if not, every row comes once, with its number.
        shuffle: Order of rows or batches, as Keras takes it; 1 counts as True. "batch", which shuffles the rows of
            arrays within each batch, changes nothing: the order of a replica's rows does not matter.
        seed: Seed of the order in each epoch.
        accumulated: Micro-batches of a step.
        prefetch: Number of batches prepared ahead.

    Raises:
        TypeError: If Keras refuses the data.
        ValueError: If Keras refuses the data, the data have no rows or too few for all replicas, or endless data come
            without a number of steps.
    """
    if shuffle not in (True, False, None, "batch"):
        raise ValueError(f"shuffle is {shuffle!r}; it must be True, False or 'batch'")
    if given.x is None:
        raise ValueError("x is None, but the rows come from x; give arrays, or batches")
    if given.batch_size is not None:
        positive("batch_size", given.batch_size)
    replicas, hooks = strategy.num_replicas_in_sync, _NO_HOOKS
    if can_convert_arrays((given.x, given.y, given.sample_weight)):
        source, example, rows = _of_arrays(given, replicas * accumulated)
        compared = _spread(source)
        if trains:
            _check_enough_rows(rows_of(source), replicas, accumulated)
        else:
            source = np.arange(rows_of(source), dtype=np.int32), source
        shuffles = shuffle != "batch" and bool(shuffle)
    else:
        source, example, hooks = _of_batches(given)
        compared, rows = example, rows_of(example)
        shuffles = bool(shuffle) and isinstance(given.x, PyDataset)
    dataset = strategy.distribute_dataset(
        source,
        rows,
        seed,
        shuffle=shuffles,
        remainder="short" if trains else "pad",
        gradient_accumulation_count=accumulated,
        prefetch=prefetch,
    )
    feed = KerasFeed(dataset, example, compared, hooks)
    if trains and feed.num_batches == 0:
        _check_enough_rows(rows * source.count, replicas, accumulated)
    return feed


def rows_of_replica(strategy: Strategy, batch_size: int | None, of_all: int | None, accumulated: int = 1) -> int | None:
    """Return the rows per replica and micro-batch, given these or the rows of all replicas; None if neither is given.

    Raises:
        ValueError: If both sizes are given, or replicas and micro-batches do not divide the rows of all.
    """
    if of_all is None:
        return batch_size
    if batch_size is not None:
        raise ValueError("batch_size is for one replica, and global_batch_size for all of them; give one of them")
    parts = strategy.num_replicas_in_sync * accumulated
    if of_all % parts or of_all < parts:
        raise ValueError(
            f"global_batch_size is {of_all}, but there are {strategy.num_replicas_in_sync} replicas x "
            f"{accumulated} micro-batches; use a multiple of {parts}"
        )
    return of_all // parts


def _check_enough_rows(rows: int, replicas: int, accumulated: int) -> None:
    """Refuse data with too few rows for a step.

    Raises:
        ValueError: If each micro-batch of each replica cannot have a row.
    """
    if rows < replicas * accumulated:
        raise ValueError(
            f"the data have {rows} rows for {replicas} replicas x {accumulated} micro-batches; give at least "
            f"{replicas * accumulated}, or use fewer replicas"
        )


def _spread(arrays: Batch) -> Batch:
    """Return evenly spaced rows of arrays, from the first to the last, and the number of all rows."""
    count = rows_of(arrays)
    each = sum(leaf[:1].nbytes for leaf in jax.tree.leaves(arrays))
    places = np.linspace(0, count - 1, min(count, max(2, COMPARED_BYTES // max(1, each))), dtype=np.int64)
    return np.int64(count), jax.tree.map(lambda leaf: leaf[places], arrays)


def _of_arrays(given: DataArguments, per_step: int) -> tuple[Batch, Batch, int]:
    """Return NumPy arrays as Keras makes them, `(x, y, sample_weight)`, some of their rows, and the batch size.

    Raises:
        ValueError: If there are no rows.
    """
    settings = {"sample_weight": given.sample_weight, "class_weight": given.class_weight}
    rows = ArrayDataAdapter(given.x, given.y, **settings)._num_samples
    if not rows:
        raise ValueError("the data have no rows; give at least one")
    whole = ArrayDataAdapter(given.x, given.y, **settings, batch_size=max(1, rows))
    arrays = unpack_x_y_sample_weight(next(iter(whole.get_numpy_iterator())))
    size = given.batch_size or (-(-rows // (given.steps * per_step)) if given.steps else DEFAULT_BATCH_SIZE)
    return arrays, jax.tree.map(lambda leaf: leaf[:size], arrays), size


def _of_batches(given: DataArguments) -> tuple[NumberedBatches | StreamOfBatches, Batch, Hooks]:
    """Return batches `(x, y, sample_weight)` of a source other than arrays, the first batch, and the epoch's hooks."""
    x = given.x
    adapter = get_data_adapter(  # refuses arguments that the source does not take
        x, given.y, sample_weight=given.sample_weight, class_weight=given.class_weight
    )
    if isinstance(x, PyDataset):
        hooks = (x.on_epoch_begin, x.on_epoch_end)
        read = _reader(x, given.class_weight)
        return *_numbered(read, x.num_batches, given), hooks
    if _is_map_dataset(x):
        count = None if len(x) == sys.maxsize else len(x)  # grain's length of endless data sets
        return *_numbered(lambda number: _standard(x[number]), count, given), _NO_HOOKS
    if given.steps is None and _has_no_end(x):
        _raise_endless(x)

    def begin() -> Iterator[Batch]:
        return map(_standard, adapter.get_numpy_iterator())

    hooks = (adapter.on_epoch_begin, adapter.on_epoch_end)
    if isinstance(x, types.GeneratorType):
        return *_peeked(begin(), x), hooks
    return StreamOfBatches(begin, adapter.num_batches), _peeked(begin(), x)[1], hooks


def _numbered(
    read: Callable[[int], Batch], count: int | None, given: DataArguments
) -> tuple[NumberedBatches | StreamOfBatches, Batch]:
    """Return batches that can be read by their numbers, and the first batch.

    Raises:
        ValueError: If they have no end (`count` is None), and the length of an epoch is not given.
    """
    if count is not None:
        return NumberedBatches(read, count), read(0)
    if given.steps is None:
        _raise_endless(given.x)
    return _peeked(map(read, itertools.count()), given.x)


def _has_no_end(x: Data) -> bool:
    """Return whether `x` is a `tf.data.Dataset` that repeats forever; the length of other streams is unknown."""
    cardinality = getattr(x, "cardinality", None)
    return callable(cardinality) and int(cardinality()) == -1  # tf.data.INFINITE_CARDINALITY


def _raise_endless(x: Data) -> NoReturn:
    raise ValueError(
        f"the {type(x).__name__} is an infinite dataset, and the end of an epoch is not given; give steps_per_epoch to "
        "fit, validation_steps for its validation data, or steps to evaluate and predict"
    )


def _is_map_dataset(x: Data) -> bool:
    """Return whether `x` is a data set of grain, whose batches have numbers."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(x, grain.MapDataset)


def _reader(x: PyDataset, class_weight: Mapping[int, float] | None) -> Callable[[int], Batch]:
    """Return a reader of batches by their numbers, as Keras reads without workers; batches are prepared ahead here."""
    adapter = PyDatasetAdapter.__new__(PyDatasetAdapter)
    adapter.py_dataset, adapter.class_weight = x, class_weight
    return lambda number: _standard(adapter._standardize_batch(x[number]))


def _peeked(batches: Iterator[Batch], given: Data) -> tuple[StreamOfBatches, Batch]:
    """Return a stream of all batches, and the first batch. A later start of the stream goes on where reading stopped.

    Raises:
        ValueError: If there is no batch.
    """
    first = next(batches, None)
    if first is None:
        raise ValueError(f"the {type(given).__name__} has no batch; give at least one")
    whole = itertools.chain([first], batches)
    return StreamOfBatches(lambda: whole), first


def _standard(batch: Tree) -> Batch:
    """Return a batch as `(x, y, sample_weight)` of NumPy arrays."""
    return jax.tree.map(np.asarray, unpack_x_y_sample_weight(batch))
