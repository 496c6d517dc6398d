"""Batches for a Keras model: arrays, sources in batches, and all other data, split among replicas.

With accumulation of N it takes batches (s R + r) N to (s R + r) N + N - 1. If the last batches do not fill a step, or
have other numbers of rows, their rows are joined and split among the replicas. In training each replica gets the same
number of rows; without training all rows are used, block by block.
"""

from __future__ import annotations

import collections
import itertools
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, final

import jax
import numpy as np
from keras.utils import PyDataset, unpack_x_y_sample_weight
from typing_extensions import override

from strategies.argument_checks import positive
from strategies.core.engine import Results
from strategies.data.datasets import DistributedDataset
from strategies.data.layout import Layout, epoch_order
from strategies.data.randomness import DrawWatch, kept_generators, seed_for, seeded
from strategies.data.sources import DataSource, Masked, SourceFactory, length_of
from strategies.keras.patches import ArrayDataAdapter, DataAdapter, can_convert_arrays, get_data_adapter
from strategies.strategy import Strategy
from strategies.trees import rows_of
from strategies.typing import Batch, Data, Number, Tree


@final
@dataclass(frozen=True)
class NumberedBatches(SourceFactory):
    """Batches that can be read by their numbers; each instance reads the batches of its replicas.

    If they draw random numbers from the global generators of Python, NumPy or PyTorch, these depend on the seed, the
    epoch and the number alone.

    Attributes:
        read: Function that reads a batch by its number.
        count: Number of batches; None if they have no end.
    """

    read: Callable[[int], Batch]
    count: int | None

    def __getitem__(self, number: int) -> Batch:
        return self.read(number)

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
    runs_code = True

    def __init__(self, given: NumberedBatches, layout: Layout, seed: int, shuffle: bool) -> None:
        self.steps: int | None = None
        self._smaller = -1  # number of the batch with fewer rows
        if given.count is not None:
            self.steps = layout.steps(given.count * layout.batch_size)
            with seeded(given, seed, 0) as batches:
                self._smaller = given.count - 1 if rows_of(batches[given.count - 1]) != layout.batch_size else -1
        self._layout = layout
        self._given = given
        self._seed = seed
        self._shuffle = shuffle

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        sharding, count = _StepSharding(self._layout, start * self._layout.global_batch_size), self._given.count
        order: Sequence[int] = range(sys.maxsize)
        if count is not None:
            order = epoch_order(count, self._seed, epoch, shuffle=self._shuffle).tolist()
        for step in range(start, sys.maxsize if self.steps is None else self.steps):
            numbers = order[step * sharding.per_step : (step + 1) * sharding.per_step]
            is_full = len(numbers) == sharding.per_step and self._smaller not in numbers
            own = [numbers[place] for place in sharding.own] if is_full else numbers
            if step > start and not self.draws:
                read = [self._given[number] for number in own]
            else:
                watch, reads_twice = DrawWatch(has_seen=step > start), step == start and self._layout.total_replicas > 1
                with seeded(self._given, self._seed, epoch, watch, reads_twice) as batches:
                    read = [batches[number] for number in own]
                self.draws |= watch.has_seen
            batch = sharding.shard_full_step(read) if is_full else sharding.shard(read)
            if batch is not None:
                yield batch


@final
@dataclass(eq=False)
class _Stream(DataSource):
    """The source of `StreamOfBatches`."""

    given: StreamOfBatches
    layout: Layout
    length: int | None = None

    def __post_init__(self) -> None:
        count = self.given.count
        self.steps = None if count is None else self.layout.steps(count * self.layout.batch_size)

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        sharding = _StepSharding(self.layout)
        batches = iter(self.given.begin())
        # If the number of steps is known, always stop at the same batch: a sampler may draw again at its end.
        for step in range(sys.maxsize if self.steps is None else self.steps):
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


@dataclass(eq=False)
class KerasFeed(DataAdapter):
    """A data adapter for Keras's loops, with one batch of the local replicas for each global step.

    Attributes:
        dataset: Data set of the strategy.
        example: Batch of the source, of any size.
        compared: Rows that all instances must have in common.
        hooks: Functions called at the beginning and at the end of each epoch.
        seed: Seed of random numbers of the source.
        epoch: Number of the next epoch.
        current: Pass that Keras's loop reads now, maybe through its own iterators.
    """

    dataset: DistributedDataset
    example: Batch
    compared: Batch
    hooks: Hooks = _NO_HOOKS
    seed: int = 0
    epoch: int = 0
    has_partial_batch: ClassVar[bool] = False  # Keras need not pad, because batches are padded here
    partial_batch_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.current = FeedEpoch(self)
        self._in_epoch: int | None = None  # between the hooks

    @property
    def num_batches(self) -> int | None:
        """The number of steps of an epoch; None if unknown."""
        return length_of(self.dataset)

    @property
    def batch_size(self) -> int:
        """The number of rows of all replicas in a step."""
        return self.dataset.global_batch_size

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
        if self._in_epoch is None:
            self._in_epoch = self.epoch
            self._call(0)

    def on_epoch_end(self) -> None:
        """Call the source's hook once per epoch; Keras may call this more often."""
        if self._in_epoch is not None:
            self._call(1)
            self._in_epoch = None

    def _call(self, number: int) -> None:
        """Call a hook of the source, with random numbers that depend on the seed and the epoch alone."""
        with kept_generators():
            seed_for(self.seed, self._in_epoch or 0, -1 - number)  # no batch has this number
            self.hooks[number]()

    def replay(self) -> None:
        """Bring the source from its beginning to the position: call its hooks, and read earlier epochs of a stream.

        A stream may have another order in each pass. Keras makes no pass over an epoch without a step that is left.
        """
        position = self.dataset.position()
        for epoch in range(position.epoch + (position.step == self.num_batches)):
            self.begin_with(epoch)
            self.on_epoch_begin()
            if not self.dataset.is_random_access:
                collections.deque(self.dataset.epoch(epoch), maxlen=0)
            if epoch < position.epoch:
                self.on_epoch_end()
        self.dataset.restore(position)


@dataclass(eq=False)
class FeedEpoch(Iterator[Batch]):
    """One epoch of a feed: training reads its batches, and evaluation and prediction read their results.

    The number of the epoch is chosen at the first read. With `steps_per_epoch`, Keras's loop makes the next pass at the
    end of an epoch, before the number of the next epoch is known.

    Attributes:
        feed: Feed of the epoch.
    """

    feed: KerasFeed

    def __post_init__(self) -> None:
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
        source, example, hooks = _of_batches(given, seed)
        compared, rows = example, rows_of(example)
        if given.steps and not trains and isinstance(source, StreamOfBatches):  # leave the rest for the next pass
            source = replace(source, count=min(source.count or sys.maxsize, given.steps * replicas))
        shuffles = bool(shuffle) and isinstance(given.x, PyDataset)
    dataset = strategy.distribute_dataset(
        source,
        rows,
        seed,
        shuffle=shuffles,
        remainder="short" if trains else "pad",
        gradient_accumulation_count=accumulated,
        prefetch=0 if _changes_between_batches(given) else prefetch,
    )
    feed = KerasFeed(dataset, example, compared, hooks, seed)
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


def _changes_between_batches(given: DataArguments) -> bool:
    """Return whether reading ahead would change rows: a later pass goes on, or a hook comes within a pass."""
    x = given.x
    if given.steps is None or not isinstance(x, PyDataset):
        return isinstance(x, types.GeneratorType)
    return any(getattr(type(x), name) is not getattr(PyDataset, name) for name in ("on_epoch_begin", "on_epoch_end"))


def _of_batches(given: DataArguments, seed: int) -> tuple[NumberedBatches | StreamOfBatches, Batch, Hooks]:
    """Return batches `(x, y, sample_weight)` of a source other than arrays, the first batch, and the epoch's hooks.

    Raises:
        ValueError: If there is no batch, or there is no end and the length of an epoch is not given.
    """
    x = given.x
    adapter = get_data_adapter(  # refuses arguments that the source does not take
        x, given.y, sample_weight=given.sample_weight, class_weight=given.class_weight
    )
    hooks, grain = (adapter.on_epoch_begin, adapter.on_epoch_end), sys.modules.get("grain")
    numbered: NumberedBatches | None = None
    if isinstance(x, PyDataset):  # read without Keras's workers; batches are prepared ahead here
        numbered = NumberedBatches(lambda number: _standard(adapter._standardize_batch(x[number])), x.num_batches)
        hooks = (x.on_epoch_begin, x.on_epoch_end)
    elif grain is not None and isinstance(x, grain.MapDataset):  # its length is sys.maxsize if it is endless
        numbered = NumberedBatches(lambda number: _standard(x[number]), None if len(x) == sys.maxsize else len(x))
    size: Callable[[], Number] | None = getattr(x, "cardinality", None)  # that of a tf.data.Dataset without end is -1
    if given.steps is None and (numbered.count is None if numbered else callable(size) and int(size()) == -1):
        raise ValueError(
            f"the {type(x).__name__} is an infinite dataset, and the end of an epoch is not given; give "
            "steps_per_epoch to fit, validation_steps for its validation data, or steps to evaluate and predict"
        )
    if numbered is not None:
        with seeded(numbered, seed, 0) as elements:
            return numbered, elements[0], hooks

    def begin() -> Iterator[Batch]:
        return map(_standard, adapter.get_numpy_iterator())

    batches = begin()
    first = next(batches, None)
    if first is None:
        raise ValueError(f"the {type(x).__name__} has no batch; give at least one")
    if isinstance(x, types.GeneratorType):  # a later pass goes on where reading stopped
        whole = itertools.chain([first], batches)
        return StreamOfBatches(lambda: whole), first, hooks
    return StreamOfBatches(begin, adapter.num_batches), first, hooks


def _standard(batch: Tree) -> Batch:
    """Return a batch as `(x, y, sample_weight)` of NumPy arrays."""
    return jax.tree.map(np.asarray, unpack_x_y_sample_weight(batch))
