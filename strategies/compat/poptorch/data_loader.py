"""PopTorch's data loader: the rows of this instance's replicas for each call of a model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from popdist.switches import require_switches, require_switches_or_none
from strategies.argument_checks import at_least, positive
from strategies.compat.poptorch.names import DataLoaderMode, SmallDataError
from strategies.compat.poptorch.options import Options
from strategies.data.iterators import prefetched
from strategies.data.layout import Layout, epoch_order
from strategies.errors import StrategyError
from strategies.torch.data import RowOfEpoch, SeededRows
from strategies.torch.replicas.generators import drawing_from, seed_of
from strategies.torch.tensors import HOST
from strategies.typing import Batch, Data, Element

SAMPLERS = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SequentialSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)
"""Samplers that give every instance the same order if it draws the same random numbers."""
BUFFERS = 3
"""Batches prepared ahead in the asynchronous modes."""

WITHOUT_EFFECT = ("miss_sleep_time_in_ms", "load_indefinitely", "early_preload", "sharing_strategy")
"""Other arguments of PopTorch's accessor: they concern its process and the waiting for it, and have no effect here."""

logger = logging.getLogger("strategies.torch.poptorch")


class DataLoader:
    """Batches for calls of a model: micro-batch x replicas x gradient accumulation x device iterations rows.

    Each element of an epoch is in one batch of one instance. A replica's rows depend on the data set, the options'
    seed, the number of the epoch and the number of replicas, but not on the number of instances.

    Args:
        options: Options, which are frozen from here on.
        dataset: Data set with a length and `[i]`, or a `torch.utils.data.IterableDataset`. Every instance reads an
            IterableDataset whole and takes its replicas' rows.
        batch_size: Micro-batch, in rows.
        shuffle: Whether to permute the elements anew in each epoch, by `options.randomSeed`.
        num_workers: Number of processes that read.
        drop_last: Whether to drop the rows that do not fill a batch. False gives a shorter last batch, on a single
            instance only.
        persistent_workers: Whether workers stay for the next epoch; None means True if there are workers.
        auto_distributed_partitioning: False if the program itself divides the data set among instances.
        mode: Whether batches are made when they are asked for, or ahead in a thread (the asynchronous modes).
        async_options: `buffer_size`, the number of batches made ahead. Other arguments of an
            `AsynchronousDataAccessor` have no effect.
        rebatched_worker_size: No effect: workers read whole batches with the same elements.
        sampler: Order of an epoch in place of `shuffle`. On several instances, use a sampler of PyTorch that draws from
            `options.randomSeed`, because all instances need the same order.
        batch_sampler: Refused.
        collate_fn: Function that makes a batch of a list of elements; None for PyTorch's.
        kwargs: Other arguments of `torch.utils.data.DataLoader`.

    Attributes:
        options: Options of the model.
        dataset: Data set.

    Raises:
        SmallDataError: If the data set does not fill a batch; a StrategyError and a ValueError.
        StrategyError: For a `batch_sampler`; for a `sampler` with `shuffle`; on several instances, for a shorter last
            batch or a sampler whose order may differ between them. A stream's shorter batch is found at its end, on all
            instances.
        TypeError: For unknown `async_options`, `options` of another class, and switches that are not True or False.

    Example::

        options = poptorch.Options().deviceIterations(4)
        batches = poptorch.DataLoader(options, dataset, batch_size=16, shuffle=True)
        for rows, labels in batches:  # 64 rows for each replica
            outputs, loss = model(rows, labels)
    """

    def __init__(
        self,
        options: Options,
        dataset: Data,
        batch_size: int = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: Mapping[str, object] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Element]], Batch] | None = None,
        **kwargs: Any,
    ) -> None:
        if batch_sampler is not None:
            raise StrategyError("a batch_sampler knows nothing of replicas; give batch_size, and shuffle or a sampler")
        if sampler is not None and shuffle:
            raise StrategyError("the sampler defines the order, but shuffle=True asks for another; use one of the two")
        if not isinstance(options, Options):
            raise TypeError(
                f"the options are a {type(options).__name__}; use poptorch.DataLoader(poptorch.Options(), dataset, ...)"
            )
        require_switches(drop_last=drop_last, auto_distributed_partitioning=auto_distributed_partitioning)
        require_switches_or_none(shuffle=shuffle, persistent_workers=persistent_workers)
        options._freeze()
        self.options, self.dataset = options, dataset
        replicas, local = options.strategy.replicas, options.strategy.replicas.local_replicas
        layout = Layout(positive("batch_size", batch_size), replicas.num_replicas_in_sync, local)
        if not auto_distributed_partitioning:
            layout = Layout(batch_size, len(local), range(len(local)))
        count: int = options.device_iterations * options.Training.gradient_accumulation
        self._places = np.concatenate([layout.positions(number) for number in range(count)])  # a step is a micro-batch
        self._rows_of_all = count * layout.global_batch_size
        self._has_others = len(layout.local_replicas) < layout.total_replicas
        self._mode = DataLoaderMode(mode)
        self._buffers = _buffers_of({"buffer_size": options._Popart.buffers or BUFFERS, **(async_options or {})})
        self._drops = drop_last
        self._is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        self._collate = collate_fn or torch.utils.data.default_collate
        workers = {"num_workers": num_workers, **kwargs}
        workers["persistent_workers"] = num_workers > 0 if persistent_workers is None else persistent_workers
        if self._is_iterable:
            if shuffle:
                raise StrategyError("an IterableDataset has its own order; shuffle inside the data set, with a seed")
            if num_workers > 1 and "worker_init_fn" not in kwargs:
                logger.warning(
                    "each of %d workers reads the whole IterableDataset, so its elements come %d times; read only a "
                    "part by torch.utils.data.get_worker_info(), or give a worker_init_fn",
                    num_workers,
                    num_workers,
                )
            if sampler is not None:
                raise StrategyError("an IterableDataset has its own order; choose elements inside the data set")
            self._loader = torch.utils.data.DataLoader(dataset, batch_size=None, **workers)
            return
        self._shuffle, self._sampler = bool(shuffle), sampler
        if shuffle and kwargs.get("generator") is not None:
            logger.warning("the order of shuffled elements follows options.randomSeed and ignores the generator")
        self._check_order()
        if num_workers or self._mode is DataLoaderMode.Sync:  # no thread of this process reads elements
            dataset = SeededRows(dataset, options.seed)
        self._indices = _IndexBatches(self)
        self._loader = torch.utils.data.DataLoader(
            dataset, batch_sampler=self._indices, collate_fn=self._collate, **workers
        )

    @property
    def combinedBatchSize(self) -> int:
        """The number of rows of this instance's batch."""
        return len(self._places)

    @property
    def _length(self) -> int:
        return len(self.dataset if self._sampler is None else self._sampler)  # type: ignore[arg-type]

    def _check_order(self) -> None:
        """Refuse a sampler that may give each instance another order, and lengths that leave no whole batch."""
        if self._sampler is not None and not hasattr(self._sampler, "__len__"):
            kind = type(self._sampler).__name__
            raise TypeError(f"the sampler is a {kind}, which has no length; give it a __len__")
        if self._sampler is not None and self._has_others and type(self._sampler) not in SAMPLERS:
            raise StrategyError(
                f"the sampler is a {type(self._sampler).__name__}, which may give each instance another order, but all "
                f"instances need the same; use one of {', '.join(kind.__name__ for kind in SAMPLERS)}, or "
                "auto_distributed_partitioning=False with a sampler that gives this instance's elements"
            )
        length = self._length
        if length < self._rows_of_all and self._drops:
            raise SmallDataError(
                f"the data set has {length} elements, but a batch of all replicas takes {self._rows_of_all}; use a "
                "smaller batch_size, deviceIterations or gradientAccumulation"
            )
        if length % self._rows_of_all and not self._drops and self._has_others:
            raise StrategyError(
                f"{length} elements do not divide into batches of {self._rows_of_all} for all instances, and "
                "drop_last is False; a shorter batch cannot be shared by several instances: use drop_last=True"
            )

    def __len__(self) -> int:
        if self._is_iterable:
            raise TypeError("the number of batches of an IterableDataset is unknown; iterate without len()")
        whole, rest = divmod(self._length, self._rows_of_all)
        return whole + (rest > 0 and not self._drops)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        return batches if self._mode is DataLoaderMode.Sync else prefetched(batches, self._buffers)

    def _batches(self) -> Generator[Batch, None, None]:
        if self._is_iterable:
            yield from map(self._collate, self._in_batches(self._loader))
        else:
            yield from self._loader

    def _in_batches(self, elements: Iterable[Element]) -> Iterator[list[Element]]:
        """Yield this instance's elements of each batch of all replicas."""
        elements, whole, places = iter(elements), self._rows_of_all, self._places.tolist()
        while rows := list(itertools.islice(elements, whole)):
            if len(rows) == whole:
                rows = [rows[place] for place in places]
            elif self._drops:
                return
            elif self._has_others:
                raise StrategyError(
                    f"the stream ends with {len(rows)} elements, which do not fill a batch of {whole} for all "
                    "instances, and drop_last is False; a shorter batch cannot be shared by several instances: "
                    "use drop_last=True"
                )
            yield rows

    def _indices_of(self, epoch: int) -> Iterator[list[RowOfEpoch]]:
        """Yield the indices of the elements of each batch."""
        if self._sampler is None:
            order = epoch_order(len(self.dataset), self.options.seed, epoch, shuffle=self._shuffle)
        else:
            with drawing_from(seed_of(self.options.seed, 0, epoch, 0), HOST):  # the same numbers on all instances
                order = np.fromiter(map(int, self._sampler), np.int64)
        for rows in self._in_batches(order.tolist()):
            yield [RowOfEpoch.of(index, epoch) for index in rows]

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop read the order of an epoch, and later loops those of the epochs after it.

        Without this call, the first loop reads epoch 0. Call it on all instances, with the same number, if a program
        resumes, or if one instance has looked at a batch. An `IterableDataset` has its own order.
        """
        if not self._is_iterable:
            self._indices.epoch = at_least(0, "epoch", epoch)

    def terminate(self) -> None:
        """Do nothing: threads and workers end with their iterators."""


def _buffers_of(named: Mapping[str, object]) -> int:
    """Return the number of items to read ahead; refuse arguments that no accessor takes."""
    if unknown := [name for name in named if name not in ("buffer_size", "rebatched_size", *WITHOUT_EFFECT)]:
        raise TypeError(
            f"an AsynchronousDataAccessor does not take {unknown[0]}; it takes buffer_size, {', '.join(WITHOUT_EFFECT)}"
        )
    if named.get("rebatched_size") is not None:
        raise StrategyError(
            f"rebatched_size is {named['rebatched_size']}, but the accessor joins no items; let the DataLoader do it"
        )
    return positive("buffer_size", named.get("buffer_size", BUFFERS))


class _IndexBatches:
    """A batch sampler for PyTorch's loader: the indices of the elements of each batch."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader, self.epoch = loader, 0

    def __iter__(self) -> Iterator[list[RowOfEpoch]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._loader._indices_of(epoch)

    def __len__(self) -> int:
        return len(self._loader)


class AsynchronousDataAccessor:
    """A thread that reads the items of an iterable ahead, for example of a `DataLoader` in the mode `Sync`.

    Args:
        dataset: Iterable; each loop starts it anew.
        buffer_size: Number of items to read ahead.
        named: PopTorch's other arguments, which have no effect.

    Raises:
        StrategyError: For a `rebatched_size`.
        TypeError: For arguments that PopTorch's accessor does not take.
    """

    def __init__(self, dataset: Iterable[Element], buffer_size: int = BUFFERS, **named: object) -> None:
        self._dataset = dataset
        self._buffers = _buffers_of({"buffer_size": buffer_size, **named})

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Element]:
        return prefetched((item for item in self._dataset), self._buffers)

    def terminate(self) -> None:
        """Do nothing: a thread ends with its iterator."""
