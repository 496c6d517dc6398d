"""Data sets of grain: random access, transforms with a key per element, and processes that load ahead."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType

import jax
import numpy as np

from popdist.spawned import refuse_while_spawned
from strategies.argument_checks import at_least, positive
from strategies.data.layout import Indices, Layout
from strategies.data.sources import DataSource, RandomAccess, RandomAccessSource, SourceFactory, Steps, stacked
from strategies.typing import Batch, Data

ENDLESS = 2**60
"""Steps that workers are told of; and more elements than a data set can have."""

SHARED_MEMORY = "/dev/shm"

CLOSE_TIMEOUT_S = 5.0

LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrainSource(SourceFactory):
    """A `grain.MapDataset` that `Strategy.distribute_dataset` deals out, loaded by processes if wanted.

    In epoch e element i of n is `dataset[e * n + i]`: grain's random transforms draw other numbers in every epoch, and
    those that an element gets depend on grain's seed, the epoch and the element, never on the replica that reads it,
    its instance or the worker. A resumed epoch reads nothing again.

    Worker processes are started anew (not forked) by each instance with the first batch, go on over the ends of epochs
    and end with their instance, however that ends. They are Python processes that **import the program's main module:
    what a program does has to stand under `if __name__ == "__main__":`**. They read, transform and stack whole batches,
    without JAX's devices, and get their cores from the instance.

    Args:
        dataset: a `grain.MapDataset`, or a source of random access (`len` and `[i]`), of which one is made. Elements
            are pytrees of arrays and scalars of the same structure and shapes.
        num_workers: processes that each instance starts; 0 loads in the thread that prefetches.
        worker_buffer_size: batches that each of them prepares ahead.

    Raises:
        ImportError: if grain is not installed.
        TypeError: if `dataset` is none of these, or a number is no integer.
        ValueError: if `dataset` has no end, or a number is out of range.
        LifeCycleError: in a worker that runs the program again, because its main module is not guarded.
    """

    dataset: Data
    num_workers: int = 0
    worker_buffer_size: int = 1

    def __post_init__(self) -> None:
        at_least(0, "num_workers", self.num_workers)
        positive("worker_buffer_size", self.worker_buffer_size)
        refuse_while_spawned()
        grain = _import_grain()
        if isinstance(self.dataset, grain.IterDataset | grain.DataLoader):
            kind = type(self.dataset).__name__
            raise TypeError(
                f"a {kind} of grain can only be read from its beginning; give GrainSource the grain.MapDataset before "
                "to_iter_dataset(), or distribute the iterable itself"
            )
        if not isinstance(self.dataset, grain.MapDataset):
            if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
                kind = type(self.dataset).__name__
                raise TypeError(f"dataset is a {kind}; use a grain.MapDataset, or an object with a length and [i]")
            object.__setattr__(self, "dataset", grain.MapDataset.source(self.dataset))
        if len(self.dataset) >= ENDLESS:
            raise ValueError("the data set repeats for ever; leave repeat() out: every epoch goes through it once")

    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        """The local replicas' share; ValueError if it does not fill a step."""
        length = len(self.dataset)
        steps = Steps(self.dataset, length, layout, seed=seed, shuffle=shuffle, read=read_of_epoch)
        if self.num_workers == 0:
            return RandomAccessSource(steps)
        return WorkerSource(steps, self.num_workers, self.worker_buffer_size)


def read_of_epoch(source: RandomAccess, epoch: int, indices: Indices) -> Batch:
    """Read elements of a `grain.MapDataset`, whose random transforms know the epoch by the index.

    Raises:
        ValueError: if a filter of grain has left a hole.
    """
    elements = [source[epoch * len(source) + int(index)] for index in indices]
    for index, element in zip(indices, elements, strict=True):
        if element is None:
            raise ValueError(
                f"element {index} of epoch {epoch} is missing: a filter has taken it out, and replicas would get "
                "unequally many; filter the records before grain reads them, or mark elements instead"
            )
    return stacked(elements)


def as_grain_source(source: Data) -> GrainSource | None:
    """A `GrainSource`, or one of what is a `grain.MapDataset`; otherwise None, without importing grain."""
    if isinstance(source, GrainSource):
        return source
    grain = sys.modules.get("grain")
    is_map_dataset = grain is not None and isinstance(source, getattr(grain, "MapDataset", ()))
    return GrainSource(source) if is_map_dataset else None


class WorkerSource(DataSource):
    """Batches that worker processes of grain prepare; each of them every `num_workers`-th step."""

    is_random_access = True

    def __init__(self, steps: Steps, num_workers: int, buffer_size: int) -> None:
        self._steps = steps
        self._num_workers = num_workers
        self._buffer_size = buffer_size
        self.length: int = steps.length
        self.steps: int = steps.per_epoch
        self._idle: list[_Workers] = []  # those that stand at a step that may be asked for next
        weakref.finalize(self, _close_all, self._idle)

    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        """See `DataSource`. At the end of an epoch the workers go on with the next one."""
        workers = self._workers_at(epoch * self.steps + start)
        try:
            for _ in range(start, self.steps):
                yield workers.read()
        except BaseException:
            workers.close()
            raise
        self._idle.append(workers)

    def _workers_at(self, number: int) -> _Workers:
        while self._idle:
            workers = self._idle.pop()
            if workers.number == number:
                return workers
            workers.close()
        return _Workers(self._steps, number, self._num_workers, self._buffer_size)


class _Workers:
    """Processes that read steps from one on, in order.

    Attributes:
        number: the step that `read` returns next.
    """

    def __init__(self, steps: Steps, number: int, num_workers: int, buffer_size: int) -> None:
        grain = _import_grain()
        _have_flags()
        self.number = number
        batches = grain.MapDataset.source(_From(number, steps)).to_iter_dataset(grain.ReadOptions(0, 0))
        limits = grain.experimental.DatasetOptions(min_shm_size=_min_shared_bytes())
        batches = grain.experimental.WithOptionsIterDataset(batches, limits)
        options = grain.MultiprocessingOptions(num_workers, buffer_size)
        self._batches = iter(batches.mp_prefetch(options, worker_init_fn=begin_worker))
        self._in_use = threading.RLock()
        atexit.register(self.close)  # before those of multiprocessing, which came earlier

    def read(self) -> Batch:
        with self._in_use:
            try:
                batch = next(self._batches)
            except RuntimeError as error:
                error.add_note("this is about a process of strategies.GrainSource, whose own messages are above")
                raise
        self.number += 1
        return jax.tree.map(np.array, batch)  # copies: what is shared has a name that may outlive the process

    def close(self) -> None:
        """End the processes; at exit also while a thread still reads."""
        atexit.unregister(self.close)
        if not self._in_use.acquire(timeout=CLOSE_TIMEOUT_S):
            log.warning("workers have not delivered a batch for %.0f s; they are ended without it", CLOSE_TIMEOUT_S)
            return  # to multiprocessing, which ends them at exit
        try:
            self._batches.close()
        finally:
            self._in_use.release()


@dataclass(frozen=True)
class _From:
    """The steps from `first` on, as grain asks for them."""

    first: int
    steps: Steps

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Batch:
        return self.steps.read(self.first + number)


def begin_worker(index: int, count: int) -> None:
    """Prepare a worker process: it ends with its instance, and knows nothing of launchers and devices."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the instance ends it
    threading.Thread(target=_end_with_parent, name="end-with-instance", daemon=True).start()
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            del os.environ[name]
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _close_all(idle: list[_Workers]) -> None:
    while idle:
        idle.pop().close()


def _min_shared_bytes() -> int:
    """From how many bytes on arrays go through shared memory: never where that might be too small (in containers).

    Writing to shared memory that is full ends a process without a message.
    """
    try:
        free = os.statvfs(SHARED_MEMORY)
    except OSError:
        return ENDLESS
    return 0 if free.f_bavail * free.f_frsize > 1 << 30 else ENDLESS


def _import_grain() -> ModuleType:
    try:
        import grain
        import grain.experimental
    except ImportError as error:
        raise ImportError("grain is not installed; run: pip install grain") from error
    module: ModuleType = grain
    return module


def _have_flags() -> None:
    """Grain's workers read flags of absl, which fails in programs that do not parse any."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
