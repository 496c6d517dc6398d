"""The rest of a data set, every row once, in batches of one shape with padding and a mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from itertools import count

import numpy as np
from typing_extensions import override

import strategies.trees as trees
from collectives import Communicator
from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import Lockstep
from strategies.data.sources import Masked
from strategies.errors import StrategyError
from strategies.typing import Batch

_WAY_OUT = "give the result of strategy.distribute_dataset(data, batch_size, shuffle=False, remainder='pad')"


class EveryRow(ABC):
    """Batches of the local replicas, all `Masked` and of one shape.

    A pass calls `batches`, takes the batches in order, and calls `leave` if it ends before the last batch. After a lost
    instance it calls `batches` again, with the first step that is missing.

    Attributes:
        dataset: Data set of a strategy that the batches come from; None for other iterables.
        is_interleaved: Whether rows come in rounds of one row per replica, rather than replica by replica.
    """

    dataset: DistributedDataset | None = None
    is_interleaved = False

    @abstractmethod
    def batches(self, start: int) -> Generator[Masked, None, None]:
        """Yield the batches of steps `start`, `start + 1`, ..., counted from the first batch of the pass.

        Batches of a strategy's data set lie on its devices, others on the host.

        Raises:
            StrategyError: If the batches cannot be read again.
        """

    @abstractmethod
    def leave(self, done: int) -> None:
        """Stop reading after `done` batches; a strategy's data set keeps its position there."""


def every_row(dataset: Iterable[Batch], communicator: Communicator, local: int) -> EveryRow:
    """Return the rest of a data set, each row once.

    Args:
        dataset: `DistributedDataset` that drops nothing, of which the rest of the epoch is read; or an iterable of this
            instance's batches, each but the first possibly shorter. Instances may have different numbers of batches.
        communicator: Connection of the instances.
        local: Number of replicas of this instance.

    Raises:
        TypeError: If `dataset` is neither.
        ValueError: If the data set leaves rows out, or accumulates.
    """
    if isinstance(dataset, DistributedDataset):
        return _OfDataset(dataset)
    if isinstance(dataset, Mapping | tuple | str | bytes) or hasattr(dataset, "shape"):
        raise TypeError(f"the data set is a {type(dataset).__name__}, which does not consist of batches; {_WAY_OUT}")
    if not isinstance(dataset, Iterable):
        raise TypeError(f"the data set is a {type(dataset).__name__}, not an iterable of batches; {_WAY_OUT}")
    given = dataset.batches if isinstance(dataset, Lockstep) else dataset
    return _OfBatches(given, communicator, local)


class _OfDataset(EveryRow):
    """The rows of a strategy's data set; with random access they can be read again from any batch on."""

    def __init__(self, dataset: DistributedDataset) -> None:
        if dataset.gradient_accumulation_count > 1:
            raise ValueError(
                f"the data set has batches of {dataset.gradient_accumulation_count} micro-batches, which are for "
                "training only; distribute it again without gradient_accumulation_count"
            )
        if not dataset.pads and dataset.dropped != 0:
            some = "rows" if dataset.dropped is None else f"{dataset.dropped} rows"
            raise ValueError(
                f"the data set drops {some} that do not fill a batch of {dataset.global_batch_size}, but every row "
                "must be seen once; distribute it with remainder='pad'"
            )
        self.dataset: DistributedDataset = dataset
        self.is_interleaved = not dataset.is_random_access
        self._begin = dataset.position()

    @override
    def batches(self, start: int) -> Generator[Masked, None, None]:
        self.leave(start)
        for batch in self.dataset.epoch(self._begin.epoch):
            yield batch if isinstance(batch, Masked) else Masked(batch, np.ones(trees.rows_of(batch), bool))

    @override
    def leave(self, done: int) -> None:
        self.dataset.restore(replace(self._begin, step=self._begin.step + done))


class _OfBatches(EveryRow):
    """The rows of an iterable of batches, which can be read once."""

    def __init__(self, batches: Iterable[Batch], communicator: Communicator, local: int) -> None:
        self._batches = batches
        self._communicator = communicator
        self._local = local
        self._is_begun = False

    @override
    def leave(self, done: int) -> None:
        """Do nothing: an iterable has no position."""

    @override
    def batches(self, start: int) -> Generator[Masked, None, None]:
        """Yield the batches from the first one on. Taking a batch is a collective call."""
        if self._is_begun:
            raise StrategyError(
                "an instance is lost, and its part of these batches cannot be read again; "
                "use the batches of strategy.distribute_dataset"
            )
        self._is_begun = True
        batches = iter(self._batches)
        last: Masked | None = None
        rows = 0  # rows of each replica
        for number in count():
            found = next(batches, None)
            batch = None if found is None else _checked(found, last, number)
            mine = -1 if batch is None else -(-len(batch.mask) // self._local)
            reported = self._communicator.all_gather(np.array(mine), name=f"rows of batch {number}")
            if reported.max() < 0:
                return
            rows = rows or int(reported.max())
            _check_rows(reported, rows, number)
            if batch is not None and len(batch.mask):
                last = _padded(batch, rows * self._local)
            else:
                assert last is not None
                last = Masked(last.values, np.zeros(rows * self._local, bool))
            yield last


def _checked(batch: Batch, last: Masked | None, number: int) -> Masked:
    """Return a batch as host arrays, whose leaves have the rows along their first axis.

    Raises:
        ValueError: If leaves differ in their number of rows, or the batch is unlike the batch before.
    """
    given, mask = (batch.values, batch.mask) if isinstance(batch, Masked) else (batch, None)
    values = trees.map(np.asarray, given)
    shapes = {f"batch{trees.keystr(p)}": leaf.shape for p, leaf in trees.leaves_with_path(values)}
    if not shapes:
        raise ValueError(f"batch {number} has no arrays; {_WAY_OUT}")
    if len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values():
        listed = ", ".join(f"{name} is of shape {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"the first axis of every array of a batch is its rows, but in batch {number} {listed}; leave out arrays "
            "that do not belong to rows, and close over them instead"
        )
    if last is not None and _row_of(values) != _row_of(last.values):
        raise ValueError(
            f"batch {number} has rows of other structure, shapes or dtypes than the batch before it; make them alike"
        )
    [rows] = {shape[0] for shape in shapes.values()}
    return Masked(values, np.ones(rows, bool) if mask is None else np.asarray(mask))


def _row_of(values: Batch) -> tuple[object, list[tuple[tuple[int, ...], np.dtype]]]:
    """Return the structure, shapes and dtypes that all batches share."""
    leaves, structure = trees.flatten(values)
    return structure, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]


def _check_rows(reported: np.ndarray, rows: int, number: int) -> None:
    """Refuse numbers of rows per replica that padding cannot make equal; all instances raise the same error.

    Raises:
        ValueError: If the first batch of an instance is empty, or a later batch is longer than the first.
    """
    if number == 0 and (reported.min() < 0 or rows == 0):
        missing = np.flatnonzero(reported <= 0).tolist()
        raise ValueError(
            f"the first batch of instances {missing} has no row, but padding repeats rows; give every instance at "
            "least one row"
        )
    if reported.max() > rows:
        raise ValueError(
            f"batch {number} has {reported.max()} rows for each replica, but the first batch has {rows}; only shorter "
            "batches are padded: begin with the longest"
        )


def _padded(batch: Masked, rows: int) -> Masked:
    """Return the batch with its last row repeated, masked as padding."""
    given = len(batch.mask)
    take = np.minimum(np.arange(rows), given - 1)
    values = trees.map(lambda leaf: leaf[take], batch.values)
    return Masked(values, batch.mask[take] & (np.arange(rows) < given))
