"""Benchmarks of data sets and infeeds, and the command that tells whether data or compute limits a training.

python -m strategies.dataset_benchmark program.py:make_dataset [program.py:make_step] [options]
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from popdist.switches import require_switches
from strategies.argument_checks import positive
from strategies.data.datasets import DistributedDataset
from strategies.data.iterators import prefetched
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.job_strategies import LocalStrategy
from strategies.loops import repeat
from strategies.typing import Batch, Data, Element, Function, Numbers, Tree

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


# ---- the command

_T = TypeVar("_T", int, float)

WARM_UP_BATCHES = 4
WARM_UP_STEPS = 2
TIMED_STEPS = 10
COLUMNS = "{:>5}  {:>7}  {:>12}  {:>8}  {:>12}"


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print; if an argument is wrong, end the process with one line on stderr."""
    parser = _parser()
    options = parser.parse_intermixed_args(words)
    if options.make_step is not None and options.step_ms is not None:
        parser.error("give --step-ms or a function that makes the step, not both")
    try:
        make_dataset, make_step = _function(options.make_dataset), options.make_step and _function(options.make_step)
    except ValueError as error:
        parser.error(str(error))
    strategy = LocalStrategy(num_replicas=options.replicas)
    with strategy.scope():
        dataset = _called(make_dataset, strategy)
        if options.batch_size is not None:
            if isinstance(dataset, DistributedDataset):
                parser.error("argument --batch-size: the function has distributed its data set; leave --batch-size out")
            try:
                dataset = strategy.distribute_dataset(dataset, options.batch_size)
            except (TypeError, ValueError) as error:
                parser.error(f"argument --batch-size: {error}")
        rates = _print_rates(dataset, options.epochs, options.batches)
        data_ms = median(1e3 / rate.elements_per_second for rate in rates)
        size = rates[0].rows_processed / rates[0].elements_processed
        print(f"data: {data_ms:.3f} ms per batch of {size:g} elements (median of the epochs)")
        if options.step_ms is not None:
            _print_verdict(data_ms, options.step_ms)
        elif make_step is not None:
            _print_verdict(data_ms, _step_ms(_called(make_step, strategy), next(endless(dataset))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strategies.dataset_benchmark",
        usage="%(prog)s PROGRAM.py:FUNCTION [PROGRAM.py:FUNCTION] [options]",
        description="Measure the speed of a data set, and tell whether data or compute limits the training.",
        epilog="A function that takes an argument gets the strategy. Functions are called in the strategy's scope: "
        "import Keras at the top of the program.",
    )
    parser.add_argument("make_dataset", metavar="PROGRAM.py:FUNCTION", help="makes the data set")
    parser.add_argument(
        "make_step",
        nargs="?",
        metavar="PROGRAM.py:FUNCTION",
        help="makes the step: a function of a batch that returns arrays; the command times it",
    )
    parser.add_argument("--step-ms", type=_positive(float), help="milliseconds of a step, if they are known")
    parser.add_argument(
        "--batch-size",
        type=_positive(int),
        help="elements per replica: distributes the data set of FUNCTION; without it FUNCTION must yield batches",
    )
    parser.add_argument("--replicas", type=_positive(int), default=1, help="number of replicas (default: %(default)s)")
    parser.add_argument("--epochs", type=_positive(int), default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument(
        "--batches", type=_positive(int), default=100, help="batches of an epoch (default: %(default)s)"
    )
    return parser


def _positive(kind: type[_T]) -> Callable[[str], _T]:
    def parse(word: str) -> _T:
        try:
            number = kind(word)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{word!r} is not a positive {kind.__name__}")
        return number

    return parse


def _function(name: str) -> Function:
    """Return the function that PROGRAM.py:FUNCTION names; raise ValueError if there is none."""
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not file or not function or not path.is_file():
        raise ValueError(f"{name!r} does not name a function; write PROGRAM.py:FUNCTION, with the path of a file")
    module = _module(path)
    found = getattr(module, function, None)
    if not callable(found):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"{file} has no function {function!r}; it has {', '.join(own) or 'none'}")
    return found  # type: ignore[no-any-return]


def _module(path: Path) -> ModuleType:
    """Return the program as a module, loaded once and importable by the processes that it starts."""
    folder = str(path.resolve().parent)
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path.resolve()):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python program")
    sys.path.insert(0, folder)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _called(function: Function, strategy: LocalStrategy) -> Tree:
    takes_strategy = any(
        parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in inspect.signature(function).parameters.values()
    )
    return function(strategy) if takes_strategy else function()


def _print_rates(dataset: Data, epochs: int, batches: int) -> list[EpochRate]:
    """Return the rates of the epochs; print each as soon as it is known."""
    print(COLUMNS.format("epoch", "batches", "elements/s", "GB/s", "ms per batch"))
    rates = []
    for epoch, rate in enumerate(measured(dataset, epochs, batches, warm_up=WARM_UP_BATCHES)):
        columns = (rate.rows_processed / rate.time_elapsed, rate.bandwidth, 1e3 / rate.elements_per_second)
        print(COLUMNS.format(epoch, rate.elements_processed, *(f"{column:.3f}" for column in columns)), flush=True)
        rates.append(rate)
    return rates


def _step_ms(step: Function, batch: Batch) -> float:
    """Return the median time of the program's own step, on a batch that is loaded already."""
    times = []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        begin = time.perf_counter()
        jax.block_until_ready(step(batch))
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times[WARM_UP_STEPS:])


def _print_verdict(data_ms: float, step_ms: float) -> None:
    print(f"compute: {step_ms:.3f} ms per step")
    if data_ms > step_ms:
        print(
            f"Data is the bottleneck: the devices wait {100 * (1 - step_ms / data_ms):.0f} % of the time. Load with "
            "more processes (strategies.GrainSource), or move fewer bytes (transfer_dtype, strategies.casting)."
        )
    else:
        print(f"Compute is the bottleneck: the data are ready in {100 * data_ms / step_ms:.0f} % of a step's time.")
