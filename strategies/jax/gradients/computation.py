"""The interface of the computation of local replicas' gradients: a program per replica, or stages of a pipeline."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import numpy as np
from jax.extend import core

from strategies.exchange.means import Allocate, Bucket
from strategies.jax.gradients.copies import GradientCopies
from strategies.jax.gradients.leaving import TAIL, Leaving, MeansMemory
from strategies.jax.programs.segments import Part
from strategies.jax.replicas.devices import DeviceGrid, borrow, is_key
from strategies.typing import Tree, Variables


class ReplicaRun(ABC):
    """The computations of one local replica, in threads or not.

    Attributes:
        buffers: of each bucket; what one step has left there, the next one takes over.
        finished: for each bucket that a thread finishes whether its buffers are ready, or never will be.
        is_broken: whether the replica's program has raised something, or has not run yet.
        kept: for the next step.
    """

    def __init__(self, finished: int) -> None:
        self.buffers: list[Sequence[jax.Array]] = []
        self.finished = [threading.Event() for _ in range(finished)]
        self.is_broken = True
        self.kept: list[jax.Array] = []

    @abstractmethod
    def wait(self, number: int) -> Sequence[jax.Array]:
        """Return the buffers of a bucket, when they are ready; called where no thread computes any more."""


class ReplicaGradients(ABC):
    """Computes the gradients of all local replicas, bucket by bucket.

    Args:
        memory: for the means of all that leaves the replicas.
        buckets: of these, in the order in which they are ready.
        parts: the results of a replica in each of the buckets.
        runs: one for each local replica.

    Attributes:
        copies: gradients from a GPU to the host; None if JAX does.
    """

    def __init__(
        self, memory: MeansMemory, buckets: list[Bucket], parts: Sequence[Sequence[Part]], runs: Sequence[ReplicaRun]
    ) -> None:
        self.buckets = buckets
        self.copies: GradientCopies | None = None
        self._memory = memory
        self._parts = parts
        self._runs = runs
        self._begun: list[Future[None]] = []

    @property
    def means(self) -> list[np.ndarray]:
        """The memory with the means of all that leaves the replicas, once all buckets have been reduced.

        Of those that are cut this instance's part, in its shape.
        """
        return self._memory.means

    @property
    def tail(self) -> np.ndarray:
        """The memory with the mean tail, once the last bucket has been reduced."""
        return self.buckets[-1].layout.tail_view(self.buckets[-1].results)

    @abstractmethod
    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        """Begin to compute the gradients; does not wait for them.

        Args:
            variables: as they lie on the first device; not to be used up before all buckets are collected.
            of_replicas: for each local replica the arguments of the gradient function that it has for itself.
            others: what all of them share besides, as the variables; the last arguments of the gradient function.
        """

    @abstractmethod
    def _end(self) -> None:
        """Wait until all threads in `_begun` have ended, and forget them; raise what a replica has raised."""

    def collect(self) -> Iterator[tuple[Bucket, Sequence[Sequence[np.ndarray]]]]:
        """Yield each bucket when it is ready, with the local replicas' arrays for each of its buffers.

        On GPUs with `copies`, arrays may still be on their way; each is there when it is taken from the sequence.

        Raises:
            BaseException: what the program of a replica has raised, when all have ended.
        """
        for number, bucket in enumerate(self.buckets):
            if bucket is self.buckets[-1]:
                self._end()
            of_buffers = list(zip(*(self._finished(run, number) for run in self._runs), strict=True))
            if self.copies is not None:
                yield bucket, self.copies.fetch(number, of_buffers)
            else:
                yield bucket, [[borrow(array) for array in of_buffer] for of_buffer in of_buffers]

    def _finished(self, run: ReplicaRun, number: int) -> Sequence[jax.Array]:
        if not self._begun:
            return run.wait(number)
        run.finished[number].wait()
        if run.is_broken:
            self._end()
        return run.buffers[number]

    def kept(self) -> list[list[jax.Array]]:
        """Return the values that each local replica keeps for its next step, once all buckets are collected."""
        return [run.kept for run in self._runs]

    def leaves(self) -> list[list[np.ndarray]]:
        """Return the last results of each local replica: the tail (loss and metrics), gradients, and kept values."""
        found: list[dict[Part, np.ndarray]] = [{} for _ in self._runs]
        for of_bucket, (bucket, contributions) in zip(self._parts, self.collect(), strict=True):
            for parts, buffers in zip(found, zip(*contributions, strict=True), strict=True):
                parts.update(zip(of_bucket, bucket.layout.views(buffers), strict=True))
                if bucket is self.buckets[-1]:
                    parts[Part(TAIL)] = bucket.layout.tail_view(buffers)
        kept = [[np.asarray(jax.random.key_data(one) if is_key(one) else one) for one in own] for own in self.kept()]
        return [[*_put_together(parts), *own] for parts, own in zip(found, kept, strict=True)]


def _put_together(parts: Mapping[Part, np.ndarray]) -> list[np.ndarray]:
    ordered = sorted(parts, key=lambda part: (part.result, part.rows or (0, 0)))
    grouped = itertools.groupby(ordered, key=lambda part: part.result)
    return [np.concatenate([parts[part].reshape(-1) for part in group]) for _, group in grouped]


@dataclass(frozen=True)
class Kept:
    """The memory that the devices of a stage need between the passes of a step.

    Attributes:
        stage: its number.
        micro_batches: of so many at once at most.
        nbytes: of each of them at most.
    """

    stage: int
    micro_batches: int
    nbytes: int


class ReplicaPlan(ABC):
    """The programs behind the gradients, however many local replicas there are; has no memory for gradients.

    Attributes:
        leaving: the layout of the values that leave a replica to be averaged.
        sum_bytes: of a replica's accumulators of micro-batches, besides the memory of its programs.
    """

    leaving: Leaving
    sum_bytes: int

    @abstractmethod
    def buckets(self, memory: MeansMemory) -> list[Bucket]:
        """Return the buckets, each of values that travel together, in the order in which they are finished.

        Args:
            memory: for the means.
        """

    @abstractmethod
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """Return the compiled programs of a replica, by what they compute; compiled when they are asked for first."""

    def kept(self, grid: DeviceGrid) -> Sequence[Kept]:
        """Return the memory that each stage needs between the passes of a micro-batch; empty without a pipeline."""
        return ()

    @abstractmethod
    def equations(self) -> core.ClosedJaxpr:
        """Return the computation of a replica, to be compared with other instances."""

    @abstractmethod
    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> ReplicaGradients:
        """Return the computation of local replicas' gradients on their devices.

        Args:
            grid: where they run.
            allocate: makes memory for results.
            failed: called with what a replica's program raises, when others may be waiting for it.
        """
