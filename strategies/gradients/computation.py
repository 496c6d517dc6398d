"""The interface of the computation of local replicas' gradients: a program per replica, or stages of a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.extend import core

from strategies.exchange.means import Allocate, Bucket
from strategies.gradients.leaving import Leaving, MeansMemory
from strategies.replicas.devices import DeviceGrid
from strategies.typing import Tree, Variables


class ReplicaGradients(ABC):
    """Computes the gradients of all local replicas, bucket by bucket."""

    @property
    @abstractmethod
    def means(self) -> list[np.ndarray]:
        """The memory with the means of all that leaves the replicas, once all buckets have been reduced.

        Of those that are cut this instance's part, in its shape.
        """

    @property
    @abstractmethod
    def tail(self) -> np.ndarray:
        """The memory with the mean tail, once the last bucket has been reduced."""

    @abstractmethod
    def dispatch(self, variables: Variables, of_replicas: Sequence[Sequence[Tree]], others: Tree = None) -> None:
        """Begin to compute the gradients; does not wait for them.

        Args:
            variables: as they lie on the first device; not to be used up before all buckets are collected.
            of_replicas: for each local replica the arguments of the gradient function that it has for itself.
            others: what all of them share besides, as the variables; the last arguments of the gradient function.
        """

    @abstractmethod
    def collect(self) -> Iterator[tuple[Bucket, list[list[np.ndarray]]]]:
        """Yield each bucket when it is ready, with the local replicas' arrays for each of its buffers.

        Raises:
            BaseException: what the program of a replica has raised, when all have ended.
        """

    @abstractmethod
    def kept(self) -> list[list[Tree]]:
        """Return the values that each local replica keeps for its next step, once all buckets are collected."""

    @abstractmethod
    def leaves(self) -> list[list[np.ndarray]]:
        """Return the last results of each local replica: the tail (loss and metrics), gradients, and kept values."""


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
    """The programs behind the gradients, however many local replicas there are; has no memory for gradients."""

    @property
    @abstractmethod
    def leaving(self) -> Leaving:
        """The layout of the values that leave a replica to be averaged."""

    @abstractmethod
    def buckets(self, memory: MeansMemory) -> list[Bucket]:
        """Return the buckets, each of values that travel together, in the order in which they are finished.

        Args:
            memory: for the means.
        """

    @property
    @abstractmethod
    def sum_bytes(self) -> int:
        """The bytes of a replica's accumulators of micro-batches, besides the memory of its programs."""

    @abstractmethod
    def executables(self, grid: DeviceGrid) -> Mapping[str, jax.stages.Compiled]:
        """Return the compiled programs of a replica, by what they compute; compiled when they are asked for first."""

    @abstractmethod
    def kept(self, grid: DeviceGrid) -> Sequence[Kept]:
        """Return the memory that each stage needs between the passes of a micro-batch; empty without a pipeline."""

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
