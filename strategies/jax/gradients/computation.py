"""The interface of the computation of local replicas' gradients, by a program per replica or stages of a pipeline."""

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
from strategies.jax.gradients.host_views import HostViews
from strategies.jax.gradients.leaving import TAIL, Leaving, MeansMemory
from strategies.jax.programs.segments import Part
from strategies.jax.replicas.devices import DeviceGrid, is_key
from strategies.typing import Tree, Variables


class ReplicaRun(ABC):
    """The computations of one local replica in a step, in threads or not.

    Attributes:
        buffers: Buffers of each bucket; a step reuses the memory of the previous one.
        finished: Event for each bucket that a thread finishes: its buffers are ready, or never will be.
        is_broken: Whether the replica's program has raised, or has not run yet; then the buffers are made anew.
        kept: Values kept for the next step.
    """

    def __init__(self, finished: int) -> None:
        self.buffers: list[Sequence[jax.Array]] = []
        self.finished = [threading.Event() for _ in range(finished)]
        self.is_broken = True
        self.kept: list[jax.Array] = []

    @abstractmethod
    def wait(self, number: int) -> Sequence[jax.Array]:
        """Wait for the buffers of a bucket, and return them. Called only while no thread computes."""


class ReplicaGradients(ABC):
    """The gradients of all local replicas, computed bucket by bucket.

    For each step the engine calls `dispatch`, reads `collect` to its end, and then `kept` and `means`. If `collect`
    raises, all programs have ended, and the next `dispatch` begins a new step.

    Args:
        memory: Memory for the means of the values that leave the replicas.
        buckets: Buckets of these values, in the order in which they are ready.
        parts: Results of a replica in each bucket.
        runs: Computation of each local replica.

    Attributes:
        copies: Copies of gradients from a GPU to the host; None if JAX makes them.
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
        self._views = [[HostViews() for _ in buckets] for _ in runs]

    @property
    def means(self) -> list[np.ndarray]:
        """The means of the values that leave the replicas, once all buckets have been reduced.

        A mean that is cut into shards is represented by this instance's part, in its shape.
        """
        return self._memory.means

    @property
    def tail(self) -> np.ndarray:
        """The mean tail, once the last bucket has been reduced."""
        return self.buckets[-1].layout.tail_view(self.buckets[-1].results)

    @abstractmethod
    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        """Begin to compute the gradients, without waiting for them.

        Args:
            variables: Variables on the first device; not to be used up before all buckets are collected.
            of_replicas: Arguments of the gradient function that each local replica has for itself.
            others: Last arguments of the gradient function, which all replicas share; on the device of the variables.
        """

    @abstractmethod
    def _end(self) -> None:
        """Wait until all threads in `_begun` have ended, and forget them; raise the error of a replica."""

    def collect(self) -> Iterator[tuple[Bucket, Sequence[Sequence[np.ndarray]]]]:
        """Yield each bucket when it is ready, with the arrays of the local replicas for each of its buffers.

        On GPUs with `copies`, arrays may still be being copied; taking one from the sequence waits for it.

        Raises:
            BaseException: The error of a replica's program, after all programs have ended.
        """
        for number, bucket in enumerate(self.buckets):
            if bucket is self.buckets[-1]:
                self._end()
            finished = [self._finished(run, number) for run in self._runs]
            if self.copies is not None:
                yield bucket, self.copies.fetch(number, list(zip(*finished, strict=True)))
                continue
            views = [of[number].of(run.buffers, number) for of, run in zip(self._views, self._runs, strict=True)]
            yield bucket, list(zip(*views, strict=True))

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
        """Return the results of each local replica for this step: the tail, gradients, and kept values."""
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
        stage: Number of the stage.
        micro_batches: Largest number of micro-batches kept at once.
        nbytes: Size of one micro-batch's values in bytes, at most.
    """

    stage: int
    micro_batches: int
    nbytes: int


class ReplicaPlan(ABC):
    """The programs of a replica's gradients, independent of the number of local replicas, without memory for gradients.

    The preparation of a step compares `equations` between instances, and calls `gradients_on`. If the local replicas
    change, it calls `gradients_on` again. A plan holds no state of steps, so errors in steps leave it usable.

    Attributes:
        leaving: Layout of the values that leave a replica to be averaged.
        sum_bytes: Size of a replica's accumulators of micro-batches, besides the memory of its programs.
    """

    leaving: Leaving
    sum_bytes: int

    @abstractmethod
    def buckets(self, memory: MeansMemory) -> list[Bucket]:
        """Return the buckets of values that travel together, the first finished one first.

        Args:
            memory: Memory for the means.
        """

    @abstractmethod
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """Return the compiled programs of a replica, by names; the first call compiles them."""

    def kept(self, grid: DeviceGrid) -> Sequence[Kept]:
        """Return the memory that each stage needs between the passes of a micro-batch; empty without a pipeline."""
        return ()

    @abstractmethod
    def equations(self) -> core.ClosedJaxpr:
        """Return the computation of a replica, for the comparison with other instances."""

    @abstractmethod
    def gradients_on(
        self, grid: DeviceGrid, allocate: Allocate, failed: Callable[[BaseException], None]
    ) -> ReplicaGradients:
        """Return the computation of the local replicas' gradients on their devices.

        Args:
            grid: Devices of the replicas.
            allocate: Function that makes memory for results.
            failed: Callback with the error of a replica's program, while other replicas may wait for that replica.
        """
