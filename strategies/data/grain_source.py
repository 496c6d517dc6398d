"""Data sets of grain: random access, transforms with a random key per element, and worker processes that read ahead."""

from __future__ import annotations

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

import numpy as np
from typing_extensions import override

import strategies.trees as trees
from collectives import forks
from popdist.spawned import refuse_while_spawned
from strategies.argument_checks import at_least, positive
from strategies.data.layout import Indices, Layout
from strategies.data.randomness import DrawWatch
from strategies.data.sources import DataSource, RandomAccess, RandomAccessSource, SourceFactory, Steps, stacked
from strategies.late_jax import jax
from strategies.typing import Batch, Data

ENDLESS = 2**60
"""The number of steps that workers see, larger than any number of elements in a data set."""

SHARED_MEMORY = "/dev/shm"

CLOSE_TIMEOUT_S = 5.0

LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrainSource(SourceFactory):
    """A `grain.MapDataset` for `Strategy.distribute_dataset`, optionally loaded by worker processes.

    In epoch e, element i of n is `dataset[e * n + i]`, so grain's random transforms differ in every epoch. An element's
    transforms depend on grain's seed, the epoch and the element, never on its replica, instance or worker. A resumed
    epoch reads no element again.

    Each instance spawns its worker processes (it does not fork) with the first batch. They serve all epochs and end
    with their instance, in whatever way it ends. They are Python processes that **import the program's main module: put
    the program's work under `if __name__ == "__main__":`**. They read, transform and stack whole batches, without JAX's
    devices, on the cores of the instance.

    Example::

        images = grain.MapDataset.source(files).seed(0).map(decode).random_map(augment)
        dataset = strategy.distribute_dataset(strategies.GrainSource(images, num_workers=2), batch_size=32)

    Args:
        dataset: `grain.MapDataset`, or a random-access source (`len` and `[i]`), which becomes one. Elements are
            pytrees of arrays and scalars of the same structure and shapes.
        num_workers: Number of processes that each instance starts; 0 loads in the prefetch thread.
        worker_buffer_size: Number of batches that each process prepares ahead.

    Raises:
        ImportError: If grain is not installed.
        TypeError: If `dataset` is not one of these, or a number is not an integer.
        ValueError: If `dataset` has no end, or a number is out of range.
        LifeCycleError: In a worker that runs the program again, because the main module is not guarded.
    """

    dataset: Data
    num_workers: int = 0
    worker_buffer_size: int = 1

    def __post_init__(self) -> None:
        at_least(0, "num_workers", self.num_workers)
        positive("worker_buffer_size", self.worker_buffer_size)
        refuse_while_spawned()
        grain, kind = _import_grain(), type(self.dataset).__name__
        if isinstance(self.dataset, grain.IterDataset | grain.DataLoader):
            raise TypeError(
                f"a {kind} of grain can only be read from its beginning; give GrainSource the grain.MapDataset before "
                "to_iter_dataset(), or distribute the iterable itself"
            )
        if not isinstance(self.dataset, grain.MapDataset):
            if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
                raise TypeError(f"dataset is a {kind}; use a grain.MapDataset, or an object with a length and [i]")
            object.__setattr__(self, "dataset", grain.MapDataset.source(self.dataset))
        if len(self.dataset) >= ENDLESS:
            raise ValueError("the data set repeats forever; leave repeat() out: every epoch goes through it once")

    @override
    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        length = len(self.dataset)
        steps = Steps(self.dataset, length, layout, seed=seed, shuffle=shuffle, read=read_of_epoch)
        if self.num_workers == 0:
            return RandomAccessSource(steps)
        return WorkerSource(steps, self.num_workers, self.worker_buffer_size)


def read_of_epoch(source: RandomAccess, epoch: int, indices: Indices) -> Batch:
    """Read elements of a `grain.MapDataset`, at indices from which its random transforms know the epoch.

    Raises:
        ValueError: If a filter of grain has removed an element.
    """
    elements = [source[epoch * len(source) + int(index)] for index in indices]
    for index, element in zip(indices, elements, strict=True):
        if element is None:
            raise ValueError(
                f"element {index} of epoch {epoch} is missing: a filter removed it, and replicas would get different "
                "numbers of elements; filter the records before grain reads them, or mark elements instead"
            )
    return stacked(elements)


def as_grain_source(source: Data) -> GrainSource | None:
    """Return a `GrainSource`, made from a `grain.MapDataset` if necessary; None for others, without importing grain."""
    if isinstance(source, GrainSource):
        return source
    grain = sys.modules.get("grain")
    is_map_dataset = grain is not None and isinstance(source, getattr(grain, "MapDataset", ()))
    return GrainSource(source) if is_map_dataset else None


class WorkerSource(DataSource):
    """Batches prepared by `num_workers` processes of grain; each process prepares every `num_workers`-th step."""

    is_random_access = True

    def __init__(self, steps: Steps, num_workers: int, buffer_size: int) -> None:
        self._steps = steps
        self._num_workers = num_workers
        self._buffer_size = buffer_size
        self.length: int = steps.length
        self.steps: int = steps.per_epoch
        self._idle: list[_Workers] = []  # idle workers, each of which can go on from its next step
        weakref.finalize(self, _close_all, self._idle)

    @override
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
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
    """Worker processes that read consecutive steps, from a given one on.

    Attributes:
        number: Step that `read` returns next.
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
        self._made_in = forks.generation
        forks.at_exit(self.close)  # runs before the handlers of multiprocessing, which were registered earlier

    def read(self) -> Batch:
        with self._in_use:
            try:
                batch = next(self._batches)
            except RuntimeError as error:
                error.add_note("this error comes from a worker process of strategies.GrainSource; see its output above")
                raise
        self.number += 1
        return trees.map(np.array, batch)  # copies, because the name of shared memory may outlive the process

    def close(self) -> None:
        """End the processes; at exit even if a thread still reads. A forked child leaves them to its parent."""
        if self._made_in != forks.generation:
            return
        forks.not_at_exit(self.close)
        if not self._in_use.acquire(timeout=CLOSE_TIMEOUT_S):
            log.warning("workers have not delivered a batch for %.0f s; they are ended without it", CLOSE_TIMEOUT_S)
            return  # multiprocessing ends them at exit
        try:
            self._batches.close()
        finally:
            self._in_use.release()


@dataclass(frozen=True)
class _From:
    """The steps from `first` on, as the endless source that grain reads."""

    first: int
    steps: Steps

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Batch:
        return self.steps.read_seeded(self.first + number, DrawWatch() if number == 0 else None)


def begin_worker(index: int, count: int) -> None:
    """Prepare a worker process: it ends with its instance, and sees no launcher and no accelerator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker gets Ctrl-C too, but its instance ends it
    threading.Thread(target=_end_with_parent, name="end-with-instance", daemon=True).start()
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _close_all(idle: list[_Workers]) -> None:
    while idle:
        idle.pop().close()


def _min_shared_bytes() -> int:
    """Return the array size from which workers use shared memory; `ENDLESS` if it may be too small, as in containers.

    A process that writes to full shared memory dies without a message.
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
    """Mark absl's flags as parsed: grain's workers read the flags, but a program may never parse them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
