"""Batches for a model of Keras: arrays, and all else that Keras reads, dealt out among replicas."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias

import jax
import numpy as np
from keras.utils import PyDataset, unpack_x_y_sample_weight

from strategies.argument_checks import positive
from strategies.core.rows import Told
from strategies.data.datasets import DistributedDataset
from strategies.keras.batches import NumberedBatches, StreamOfBatches, rows_of
from strategies.keras.patches import (
    ArrayDataAdapter,
    DataAdapter,
    PyDatasetAdapter,
    can_convert_arrays,
    get_data_adapter,
)
from strategies.strategy import Strategy
from strategies.typing import Batch, Data, Tree

Hooks: TypeAlias = tuple[Callable[[], object], Callable[[], object]]
Shuffle: TypeAlias = bool | int | str | None
"""Order of rows or batches, as `fit` takes it."""

DEFAULT_BATCH_SIZE = 32
COMPARED_BYTES = 4 << 20
"""Most bytes of arrays that instances compare before they are used; it takes some 10 ms."""
_NO_HOOKS: Hooks = (lambda: None, lambda: None)


@dataclass(frozen=True)
class DataArguments:
    """The data that Keras's functions take; see there.

    Attributes:
        x: inputs, or all of it.
        y: targets.
        sample_weight: weights of rows.
        class_weight: weights of classes.
        batch_size: rows of a replica and micro-batch.
        steps: of an epoch.
    """

    x: Data
    y: Data = None
    sample_weight: Data = None
    class_weight: Mapping[int, float] | None = None
    batch_size: int | None = None
    steps: int | None = None


class KerasFeed(DataAdapter):
    """An adapter for Keras's loops: the batches of this instance's replicas, one for each step of all of them.

    Attributes:
        dataset: the data set of the strategy.
        example: a batch of the source, of whatever size.
        compared: rows that all instances have to see.
        epoch: the number of the epoch that is to come next.
    """

    def __init__(self, dataset: DistributedDataset, example: Batch, compared: Batch, hooks: Hooks = _NO_HOOKS) -> None:
        self.dataset = dataset
        self.example = example
        self.compared = compared
        self.epoch = 0
        self._hooks = hooks
        self._is_in_epoch = False
        self._pass: Pass | None = None

    @property
    def num_batches(self) -> int | None:
        """The number of steps of an epoch; None where nobody knows."""
        try:
            return len(self.dataset)
        except TypeError:
            return None

    @property
    def batch_size(self) -> int:
        """Rows of all replicas in a step."""
        return self.dataset.global_batch_size

    @property
    def has_partial_batch(self) -> bool:
        """Keras asks where it pads by itself; here that is done."""
        return False

    partial_batch_size = None

    def get_jax_iterator(self) -> Pass:
        """Return the batches of the next epoch."""
        self._end_pass()
        self._pass = Pass(self)
        return self._pass

    @property
    def current(self) -> Pass:
        """The pass that Keras's loop is in, which may see it through iterators of its own."""
        assert self._pass is not None
        return self._pass

    def begin_with(self, epoch: int) -> None:
        """Have the next pass that is read be that of an epoch."""
        self.epoch = epoch

    def next_epoch(self) -> int:
        """Return the number of the pass that begins to be read."""
        self.epoch += 1
        return self.epoch - 1

    def on_epoch_begin(self) -> None:
        """Call the hook of the source, once an epoch; called by Keras."""
        if not self._is_in_epoch:
            self._is_in_epoch = True
            self._hooks[0]()

    def on_epoch_end(self) -> None:
        """Call the hook of the source, once an epoch; called by Keras."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            self._hooks[1]()

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()


class Pass(Iterator[Batch]):
    """One epoch of a feed; what trains reads its batches, and what does not is told of each.

    Which one is asked when it is first read: where there are `steps_per_epoch`, Keras's loop makes the next pass at the
    end of an epoch, before it says which epoch begins.

    Attributes:
        feed: whose epoch it is.
    """

    def __init__(self, feed: KerasFeed) -> None:
        self.feed = feed
        self._batches: Iterator[Batch] | None = None
        self._told: Generator[Told, None, None] | None = None
        self._taken = 0

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self.feed.dataset.epoch(self.feed.next_epoch()))
        return next(self._batches)

    def told(self, begin: Callable[[DistributedDataset], Generator[Told, None, None]]) -> Iterator[Told]:
        """Yield what is told of the next batches; `begin` begins to tell of all batches of an epoch."""
        if self._told is None:
            dataset = self.feed.dataset
            dataset.restore(replace(dataset.position(), epoch=self.feed.next_epoch(), step=0))
            self._told = begin(dataset)
        for told in self._told:
            self._taken += 1
            yield told
            if self._taken == self.feed.num_batches:  # meet the others at the end
                self._told = (one for one in list(self._told))

    def end(self) -> None:
        """Leave it, wherever it is."""
        if self._told is not None:
            self._told.close()


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
    """Return the feed of what was given to `fit`, `evaluate` or `predict`.

    Args:
        given: see there.
        strategy: whose replicas it is for.
        trains: whether batches are to train with; otherwise every row comes once, with its number.
        shuffle: as Keras takes it, 1 too. "batch" changes nothing for arrays: a replica's rows have no order.
        seed: of the order in each epoch.
        accumulated: micro-batches of a step.
        prefetch: how many batches are prepared ahead.

    Raises:
        TypeError, ValueError: for what Keras refuses, data without rows or with too few for all replicas, and data
            without an end where nobody says how many steps there are.
    """
    if shuffle not in (True, False, None, "batch"):
        raise ValueError(f"shuffle is {shuffle!r}; it is True, False or 'batch'")
    if given.x is None:
        raise ValueError("x is None, and is where rows come from; give arrays, or batches")
    if given.batch_size is not None:
        positive("batch_size", given.batch_size)
    replicas, hooks = strategy.num_replicas_in_sync, _NO_HOOKS
    if can_convert_arrays((given.x, given.y, given.sample_weight)):
        source, example, rows = _of_arrays(given, replicas * accumulated)
        compared = _spread(source)
        if trains:
            _refuse_too_few(rows_of(source), replicas, accumulated)
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
        _refuse_too_few(rows * source.count, replicas, accumulated)
    return feed


def rows_of_replica(strategy: Strategy, batch_size: int | None, of_all: int | None, accumulated: int = 1) -> int | None:
    """Return the rows of a replica and micro-batch, given these or those of all replicas; None where nobody says so.

    Raises:
        ValueError: if both sizes are given, or that of all replicas cannot be divided.
    """
    if of_all is None:
        return batch_size
    if batch_size is not None:
        raise ValueError("batch_size is that of a replica and global_batch_size of all of them; give one of them")
    parts = strategy.num_replicas_in_sync * accumulated
    if of_all % parts or of_all < parts:
        raise ValueError(
            f"global_batch_size is {of_all}, and there are {strategy.num_replicas_in_sync} replicas x "
            f"{accumulated} micro-batches; use a multiple of {parts}"
        )
    return of_all // parts


def _refuse_too_few(rows: int, replicas: int, accumulated: int) -> None:
    """Refuse data of which no step can be made.

    Raises:
        ValueError: saying how many rows there have to be.
    """
    if rows < replicas * accumulated:
        raise ValueError(
            f"the data have {rows} rows, for {replicas} replicas x {accumulated} micro-batches; give at least "
            f"{replicas * accumulated}, or use fewer replicas"
        )


def _spread(arrays: Batch) -> Batch:
    """Return evenly spaced rows of arrays, from the first to the last, and the number of all rows."""
    count = rows_of(arrays)
    each = sum(leaf[:1].nbytes for leaf in jax.tree.leaves(arrays))
    places = np.linspace(0, count - 1, min(count, max(2, COMPARED_BYTES // max(1, each))), dtype=np.int64)
    return np.int64(count), jax.tree.map(lambda leaf: leaf[places], arrays)


def _of_arrays(given: DataArguments, per_step: int) -> tuple[Batch, Batch, int]:
    """Return arrays of NumPy as Keras makes them, `(x, y, sample_weight)`; some rows of them; and the batch size.

    Raises:
        ValueError: if there are no rows.
    """
    settings = {"sample_weight": given.sample_weight, "class_weight": given.class_weight}
    rows = ArrayDataAdapter(given.x, given.y, **settings)._num_samples
    if not rows:
        raise ValueError("the data have no rows; give one at least")
    whole = ArrayDataAdapter(given.x, given.y, **settings, batch_size=max(1, rows))
    arrays = unpack_x_y_sample_weight(next(iter(whole.get_numpy_iterator())))
    size = given.batch_size or (-(-rows // (given.steps * per_step)) if given.steps else DEFAULT_BATCH_SIZE)
    return arrays, jax.tree.map(lambda leaf: leaf[:size], arrays), size


def _of_batches(given: DataArguments) -> tuple[NumberedBatches | StreamOfBatches, Batch, Hooks]:
    """Return batches `(x, y, sample_weight)` of what is no arrays, the first of them, and what an epoch calls."""
    x = given.x
    adapter = get_data_adapter(  # which refuses what a source does not take besides
        x, given.y, sample_weight=given.sample_weight, class_weight=given.class_weight
    )
    if isinstance(x, PyDataset):
        hooks = (x.on_epoch_begin, x.on_epoch_end)
        read = _reader(x, given.class_weight)
        return *_numbered(read, x.num_batches, given), hooks
    if _is_map_dataset(x):
        count = None if len(x) == sys.maxsize else len(x)  # as grain has those that repeat for ever
        return *_numbered(lambda number: _standard(x[number]), count, given), _NO_HOOKS
    if given.steps is None and _has_no_end(x):
        _refuse_endless(x)

    def begin() -> Iterator[Batch]:
        return map(_standard, adapter.get_numpy_iterator())

    hooks = (adapter.on_epoch_begin, adapter.on_epoch_end)
    if isinstance(x, types.GeneratorType):
        return *_peeked(begin(), x), hooks
    return StreamOfBatches(begin, adapter.num_batches), _peeked(begin(), x)[1], hooks


def _numbered(
    read: Callable[[int], Batch], count: int | None, given: DataArguments
) -> tuple[NumberedBatches | StreamOfBatches, Batch]:
    """Return batches that can be read by their numbers, and the first of them.

    Raises:
        ValueError: if they have no end (`count` is None), and nobody says where an epoch ends.
    """
    if count is not None:
        return NumberedBatches(read, count), read(0)
    if given.steps is None:
        _refuse_endless(given.x)
    return _peeked(map(read, itertools.count()), given.x)


def _has_no_end(x: Data) -> bool:
    """Return whether it is a `tf.data.Dataset` that repeats for ever; of others that have no numbers nobody knows."""
    cardinality = getattr(x, "cardinality", None)
    return callable(cardinality) and int(cardinality()) == -1  # tf.data.INFINITE_CARDINALITY


def _refuse_endless(x: Data) -> NoReturn:
    raise ValueError(
        f"the {type(x).__name__} is an infinite dataset, and nobody says where an epoch ends; give steps_per_epoch to "
        "fit, validation_steps for what it validates, or steps to evaluate and predict"
    )


def _is_map_dataset(x: Data) -> bool:
    """Return whether it is a data set of grain, whose batches have numbers."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(x, grain.MapDataset)


def _reader(x: PyDataset, class_weight: Mapping[int, float] | None) -> Callable[[int], Batch]:
    """Return a reader of batches by their numbers, as Keras reads without workers: batches are prepared ahead."""
    adapter = PyDatasetAdapter.__new__(PyDatasetAdapter)
    adapter.py_dataset, adapter.class_weight = x, class_weight
    return lambda number: _standard(adapter._standardize_batch(x[number]))


def _peeked(batches: Iterator[Batch], given: Data) -> tuple[StreamOfBatches, Batch]:
    """Return a stream that goes on with these batches each time, and the first of them.

    Raises:
        ValueError: if there is none.
    """
    first = next(batches, None)
    if first is None:
        raise ValueError(f"there is no batch in the {type(given).__name__}; give one at least")
    whole = itertools.chain([first], batches)
    return StreamOfBatches(lambda: whole), first


def _standard(batch: Tree) -> Batch:
    """Return a batch as `(x, y, sample_weight)` of arrays of NumPy."""
    return jax.tree.map(np.asarray, unpack_x_y_sample_weight(batch))
