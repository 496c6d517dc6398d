"""Where the batches of a model of Keras come from: arrays, and all that Keras reads, dealt out among replicas."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter

from strategies.data.datasets import DistributedDataset
from strategies.keras.batches import NumberedBatches, StreamOfBatches, rows_of
from strategies.roles import Batch
from strategies.step.evaluation_program import Told
from strategies.strategy import Strategy

DEFAULT_BATCH_SIZE = 32


class Feed(DataAdapter):
    """What Keras's loops go through: the batches of this instance's replicas, one for each step of all of them.

    Args:
        source: where rows or batches come from.
        strategy: whose replicas they are for.
        batch_size: of each replica and micro-batch.
        trains: whether they are to train with; otherwise every row comes once, with its number.
        shuffle: whether they come in another order in each epoch.
        seed: of that order.
        accumulated: micro-batches of a step.
        prefetch: how many batches are prepared ahead.
        example: a batch of the source, of whatever size.
        hooks: called when an epoch begins, and when it ends.

    Attributes:
        dataset: the same as a data set of the strategy.
        example: see above.
        epoch: the number of the epoch that is to come next.
    """

    def __init__(
        self,
        source: Any,
        strategy: Strategy,
        batch_size: int,
        *,
        trains: bool,
        example: Batch,
        shuffle: bool = False,
        seed: int = 0,
        accumulated: int = 1,
        prefetch: int = 2,
        hooks: tuple[Callable[[], object], Callable[[], object]] = (lambda: None, lambda: None),
    ) -> None:
        self.example = example
        self.epoch = 0
        self.dataset: DistributedDataset = strategy.distribute_dataset(
            source,
            batch_size,
            seed,
            shuffle=shuffle,
            remainder="short" if trains else "pad",
            gradient_accumulation_count=accumulated,
            prefetch=prefetch,
        )
        self._hooks = hooks
        self._is_in_epoch = False
        self._pass: Pass | None = None

    @property
    def num_batches(self) -> int | None:
        """How many steps an epoch has; None where nobody knows."""
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

    @property
    def partial_batch_size(self) -> None:
        """See `has_partial_batch`."""
        return

    def get_jax_iterator(self) -> Pass:
        """The batches of the next epoch."""
        self._end_pass()
        self.epoch += 1
        self._pass = Pass(self, self.epoch - 1)
        return self._pass

    def on_epoch_begin(self) -> None:
        """Told by Keras."""
        if not self._is_in_epoch:
            self._is_in_epoch = True
            self._hooks[0]()

    def on_epoch_end(self) -> None:
        """Told by Keras."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            self._hooks[1]()

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()


class Pass(Iterator[Any]):
    """One epoch of a feed; what trains reads its batches, and what does not is told of each.

    Attributes:
        feed: whose epoch it is.
    """

    def __init__(self, feed: Feed, epoch: int) -> None:
        self.feed = feed
        self._epoch = epoch
        self._batches: Iterator[Batch] | None = None
        self._told: Generator[Told, None, None] | None = None
        self._taken = 0

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self.feed.dataset.epoch(self._epoch))
        return next(self._batches)

    def told(self, begin: Callable[[DistributedDataset], Generator[Told, None, None]]) -> Iterator[Told]:
        """What is told of the next batches.

        Args:
            begin: begins to tell of all batches of an epoch.
        """
        if self._told is None:
            dataset = self.feed.dataset
            dataset.restore(replace(dataset.position(), epoch=self._epoch, step=0))
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
    x: Any,
    y: Any,
    sample_weight: Any,
    class_weight: Any,
    strategy: Strategy,
    *,
    batch_size: int | None,
    steps: int | None,
    trains: bool,
    shuffle: Any = False,
    seed: int = 0,
    accumulated: int = 1,
    prefetch: int = 2,
) -> Feed:
    """The feed of what was given to `fit`, `evaluate` or `predict`, whose arguments these are.

    Raises:
        TypeError, ValueError: for what Keras refuses, and batches that have no rows.
    """
    settings = {"trains": trains, "accumulated": accumulated, "prefetch": prefetch, "seed": seed}
    if can_convert_arrays((x, y, sample_weight)):
        arrays = _as_arrays(x, y, sample_weight, class_weight)
        rows = rows_of(arrays)
        if batch_size is None:
            per_step = strategy.num_replicas_in_sync * accumulated
            batch_size = -(-rows // (steps * per_step)) if steps else DEFAULT_BATCH_SIZE
        example = jax.tree.map(lambda leaf: leaf[:batch_size], arrays)
        source = arrays if trains else (np.arange(rows, dtype=np.int32), arrays)
        shuffles = bool(shuffle) and shuffle != "batch"
        return Feed(source, strategy, batch_size, example=example, shuffle=shuffles, **settings)
    batches, example, hooks = _as_batches(x, y, sample_weight, class_weight)
    shuffles = bool(shuffle) and isinstance(batches, NumberedBatches)
    return Feed(batches, strategy, rows_of(example), example=example, shuffle=shuffles, hooks=hooks, **settings)


def _once(batches: Iterator[Batch]) -> Callable[[], Iterator[Batch]]:
    return lambda: batches


def _as_arrays(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Batch:
    """Arrays of NumPy as Keras makes them: `(x, y, sample_weight)`."""
    probe = ArrayDataAdapter(x, y, sample_weight=sample_weight, class_weight=class_weight)
    whole = ArrayDataAdapter(
        x, y, sample_weight=sample_weight, class_weight=class_weight, batch_size=max(1, probe._num_samples)
    )
    batch = next(iter(whole.get_numpy_iterator()))
    return unpack_x_y_sample_weight(batch)


Hooks = tuple[Callable[[], object], Callable[[], object]]


def _as_batches(
    x: Any, y: Any, sample_weight: Any, class_weight: Any
) -> tuple[NumberedBatches | StreamOfBatches, Batch, Hooks]:
    """The batches of what is no arrays, each `(x, y, sample_weight)`, the first of them, and what an epoch calls."""
    if isinstance(x, PyDataset):
        hooks = (x.on_epoch_begin, x.on_epoch_end)
        read = _reader(x, PyDatasetAdapter(x, class_weight=class_weight) if x.workers <= 1 else _quiet(x, class_weight))
        if x.num_batches is not None:
            return NumberedBatches(read, x.num_batches), read(0), hooks
        return *_peeked(map(read, itertools.count()), x), hooks
    adapter = data_adapters.get_data_adapter(x, y, sample_weight=sample_weight, class_weight=class_weight)

    def begin() -> Iterator[Batch]:
        return map(_standard, adapter.get_numpy_iterator())

    hooks = (adapter.on_epoch_begin, adapter.on_epoch_end)
    if isinstance(x, types.GeneratorType):
        return *_peeked(begin(), x), hooks
    return StreamOfBatches(begin, adapter.num_batches), _peeked(begin(), x)[1], hooks


def _reader(x: PyDataset, adapter: PyDatasetAdapter) -> Callable[[int], Batch]:
    return lambda number: _standard(adapter._standardize_batch(x[number]))


def _peeked(batches: Iterator[Batch], given: Any) -> tuple[StreamOfBatches, Batch]:
    """A stream that goes on with these batches each time, and the first of them.

    Raises:
        ValueError: if there is none.
    """
    first = next(batches, None)
    if first is None:
        raise ValueError(f"there is no batch in the {type(given).__name__}; give one at least")
    return StreamOfBatches(_once(itertools.chain([first], batches))), first


def _quiet(x: PyDataset, class_weight: Any) -> PyDatasetAdapter:
    """An adapter without workers: the feed reads ahead by itself."""
    adapter = PyDatasetAdapter.__new__(PyDatasetAdapter)
    adapter.py_dataset, adapter.class_weight, adapter.enqueuer = x, class_weight, None
    return adapter


def _standard(batch: Any) -> Batch:
    """A batch as `(x, y, sample_weight)` of arrays of NumPy."""
    return jax.tree.map(np.asarray, unpack_x_y_sample_weight(batch))
