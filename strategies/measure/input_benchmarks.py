"""Benchmarks of data sets and infeed queues, with the figures that the original reports."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice

import jax
import jax.numpy as jnp
import numpy as np

from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import prefetched
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.loops import repeat
from strategies.typing import Data, Element, Numbers, Tree

logger = logging.getLogger(__name__)

BUFFERED_ELEMENTS = 2


@dataclass(frozen=True)
class EpochRate:
    """The figures of one epoch of a benchmark.

    Attributes:
        elements_processed: Number of elements that the data set yielded; those of a distributed data set are batches.
        total_bytes_processed: Size of their arrays in bytes.
        time_elapsed: Duration in seconds.
        rows_processed: Number of elements inside batches: the leading length of their first arrays.
    """

    elements_processed: int
    total_bytes_processed: int
    time_elapsed: float
    rows_processed: int

    @property
    def elements_per_second(self) -> float:
        """The number of elements per second."""
        return self.elements_processed / self.time_elapsed

    @property
    def bandwidth(self) -> float:
        """The number of GB (10^9 bytes) per second."""
        return self.total_bytes_processed / (1e9 * self.time_elapsed)

    def to_dict(self) -> dict[str, float]:
        """Return the figures under the original's names, in single precision as there."""
        names = ("elements_processed", "total_bytes_processed", "time_elapsed", "elements_per_second", "bandwidth")
        return {name: float(np.float32(getattr(self, name))) for name in names}


def dataset_benchmark(
    dataset: Data,
    number_of_epochs: int,
    elements_per_epochs: int | None = None,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
    *,
    elements_per_epoch: int | None = None,
) -> str:
    """Read a data set as fast as possible, without computing anything (`ipu.dataset_benchmark.dataset_benchmark`).

    One thread reads ahead and one consumes, as in training.

    Args:
        dataset: `DistributedDataset`, which begins its next epoch when one has ended, or an iterable of pytrees of
            arrays that is long enough. An element is a value that it yields.
        number_of_epochs: Number of epochs that are timed.
        elements_per_epochs: Elements of each epoch.
        print_stats: Whether elements and GB per second are logged for each epoch.
        apply_debug_options: Accepted because the original has it; without effect.
        do_memcpy: Whether each array is copied, as to a device.
        elements_per_epoch: Another name of `elements_per_epochs`.

    Returns:
        JSON: `{"epochs": [{"elements_processed", "total_bytes_processed", "time_elapsed" (s), "elements_per_second",
        "bandwidth" (GB/s)}, ...]}`, all of them floats.

    Raises:
        TypeError: A number is not an integer, a switch is neither True nor False, or the data set cannot be iterated
            or has no arrays.
        ValueError: A number is less than 1, a dimension is 0, or the data set ends too early.
    """
    require_switches(print_stats=print_stats, apply_debug_options=apply_debug_options, do_memcpy=do_memcpy)
    rates = measured(dataset, number_of_epochs, _one_of(elements_per_epochs, elements_per_epoch), do_memcpy)
    return _report(rates, print_stats)


def infeed_benchmark(
    infeed_queue: InfeedQueue,
    number_of_epochs: int,
    elements_per_epochs: int | None = None,
    print_stats: bool = True,
    do_memcpy: bool = True,
    *,
    elements_per_epoch: int | None = None,
) -> str:
    """Dequeue an infeed as fast as possible, in a compiled loop of one replica that computes nothing.

    Args:
        infeed_queue: Infeed, which prefetches by itself.
        number_of_epochs: Number of epochs that are timed.
        elements_per_epochs: Elements of each epoch.
        print_stats: Whether elements and GB per second are logged for each epoch.
        do_memcpy: Whether the program keeps each element until the next one arrives.
        elements_per_epoch: Another name of `elements_per_epochs`.

    Returns:
        The JSON of `dataset_benchmark`.

    Raises:
        TypeError: A number is not an integer, or `infeed_queue` is not an infeed.
        ValueError: A number is less than 1. The infeed itself refuses a dimension of 0.
        EndOfDataError: The infeed has fewer elements.
    """
    require_switches(print_stats=print_stats, do_memcpy=do_memcpy)
    if not isinstance(infeed_queue, InfeedQueue):
        raise TypeError(f"infeed_queue is a {type(infeed_queue).__name__}; use a strategies.InfeedQueue")
    per_epoch = _one_of(elements_per_epochs, elements_per_epoch)
    return _report(_dequeued(infeed_queue, number_of_epochs, per_epoch, do_memcpy), print_stats)


def measured(dataset: Data, epochs: int, per_epoch: int, copies: bool = True, warm_up: int = 0) -> Iterator[EpochRate]:
    """Yield the rate of each epoch of `per_epoch` elements as soon as it has ended.

    Args:
        dataset: Data set of `dataset_benchmark`. A collective data set reads ahead itself, so it is not read ahead
            here.
        epochs: Number of epochs.
        per_epoch: Elements of each epoch.
        copies: Whether each array is copied.
        warm_up: Number of elements read before the first epoch, without being timed.

    Raises:
        TypeError: As in `dataset_benchmark`.
        ValueError: As in `dataset_benchmark`.
    """
    positive("number_of_epochs", epochs)
    positive("elements_per_epochs", per_epoch)
    consumer = _Consumer(copies)
    buffered = 0 if getattr(dataset, "is_collective", False) else BUFFERED_ELEMENTS
    with closing(prefetched(endless(dataset), buffered)) as ahead:
        for element in islice(ahead, warm_up):
            consumer.take(element)
        for epoch in range(epochs):
            begin = time.perf_counter()
            taken = [consumer.take(element) for element in islice(ahead, per_epoch)]
            elapsed = time.perf_counter() - begin
            if len(taken) < per_epoch:
                raise ValueError(
                    f"the data set ended after {epoch * per_epoch + len(taken)} of {epochs * per_epoch} elements; "
                    "repeat it, or ask for fewer epochs or elements"
                )
            yield EpochRate(per_epoch, sum(nbytes for nbytes, _ in taken), elapsed, sum(rows for _, rows in taken))


def _dequeued(queue: InfeedQueue, epochs: int, per_epoch: int, copies: bool) -> Iterator[EpochRate]:
    """Yield the rates of epochs that a loop on the device dequeues."""
    positive("number_of_epochs", epochs)
    positive("elements_per_epochs", per_epoch)
    kept = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in queue.spec.leaves] if copies else [jnp.int32(0)]

    def body(*values: Tree, **named: Tree) -> list[Tree]:
        return jax.tree.leaves((values[len(kept) :], named)) if copies else [values[0] + 1]

    element_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in queue.spec.leaves)
    rows = next(iter(queue.spec.leaves[0].shape), 1)
    repeat(0, body, kept, queue)  # compiles the loop
    for _ in range(epochs):
        begin = time.perf_counter()
        repeat(per_epoch, body, kept, queue)
        yield EpochRate(per_epoch, per_epoch * element_bytes, time.perf_counter() - begin, per_epoch * rows)


def endless(dataset: Data) -> Generator[Element, None, None]:
    """Yield the elements of a data set; of a `DistributedDataset` the batches of one epoch after another."""
    if isinstance(dataset, DistributedDataset):
        return (batch for epoch in count() for batch in dataset.epoch(epoch))
    if not isinstance(dataset, Iterable):
        raise TypeError(f"the data set is a {type(dataset).__name__}, which cannot be iterated; use an iterable")
    return (element for element in dataset)


class _Consumer:
    """A consumer of elements that copies as a device would; it reuses the memory of the copies."""

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._buffers: dict[int, np.ndarray] = {}

    def take(self, element: Element) -> tuple[int, int]:
        """Wait for an element; return its size in bytes and its number of rows."""
        arrays = [_checked(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(element))]
        if not arrays:
            raise TypeError("an element of the data set has no arrays; it needs at least one")
        if self._copies:
            for number, array in enumerate(arrays):
                np.copyto(self._buffer(number, array), array)
        return sum(array.nbytes for array in arrays), arrays[0].shape[0] if arrays[0].ndim else 1

    def _buffer(self, number: int, array: np.ndarray) -> np.ndarray:
        buffer = self._buffers.get(number)
        if buffer is None or (buffer.shape, buffer.dtype) != (array.shape, array.dtype):
            buffer = self._buffers[number] = np.empty_like(array)
        return buffer


def _checked(leaf: Numbers) -> np.ndarray:
    array = np.asarray(leaf)
    if array.dtype.kind in "OUS":
        raise TypeError(f"an element of the data set is a {type(leaf).__name__}; use arrays of numbers")
    if 0 in array.shape:
        raise ValueError(
            f"Detected a tensor in the dataset with a dimension of size 0: its shape is {array.shape}; take it out"
        )
    return array


def _report(rates: Iterator[EpochRate], print_stats: bool) -> str:
    figures = []
    for epoch, rate in enumerate(rates):
        if print_stats:
            logger.info("Processed: %g elements/second.", rate.elements_per_second)
            logger.info("Bandwidth: %g GB/s.", rate.bandwidth)
        logger.info("Dataset iterator completed epoch %d.", epoch)
        figures.append(rate.to_dict())
    return json.dumps({"epochs": figures})


def _one_of(elements_per_epochs: int | None, elements_per_epoch: int | None) -> int:
    """Return the number of elements, given under either of its two names."""
    given = [number for number in (elements_per_epochs, elements_per_epoch) if number is not None]
    if len(given) != 1:
        raise TypeError("give the elements of an epoch once: as elements_per_epochs or as elements_per_epoch")
    return given[0]
