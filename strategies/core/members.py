"""The instances of a job, as the loops of steps, evaluations and records see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from collectives import Communicator
from collectives.instruments import Instruments
from popdist.records.faults import FaultInjector
from strategies.sinks.sinks import Sinks
from strategies.typing import Batch


@dataclass
class InstanceProgress:
    """The progress of an instance in the sequence of operations that all instances do together.

    After a loss, the progress of two instances differs by at most one operation, because every operation needs all
    instances.

    Attributes:
        done: Number of complete operations.
        passes: Number of passes through data sets, without training, that have ended.
        batches: Number of batches of the present pass whose results have arrived; 0 outside of a pass.
        is_past: Whether this instance has used up the state before the present operation: the operation can only be
            completed, and not be repeated. All instances can complete it then.
        at_change: Functions that adapt states to a change of the instances, in the same order on all instances. They
            are called after each change, before the interrupted operation goes on. Collective.
        share: Function that hands the result of the last operation to instances that lack it, given a rank that has it.
            Collective. None if they need nothing.
    """

    done: int = 0
    passes: int = 0
    batches: int = 0
    is_past: bool = False
    at_change: list[Callable[[], object]] = field(default_factory=list)
    share: Callable[[int], object] | None = None

    def complete(self, share: Callable[[int], object] | None = None) -> None:
        """Note that one more operation is complete on all instances."""
        self.done += 1
        self.is_past = False
        self.share = share


class ReplicaPrograms(Protocol):
    """The running programs of the local replicas, which call back into Python for collectives and feeds.

    A step calls `begin`, and runs all programs inside `ending`.
    """

    def begin(self) -> None:
        """Drop the remains of programs that failed half-way."""

    def ending(self) -> AbstractContextManager[None]:
        """End the programs with the block. If the framework hides the error of a callback, raise that error."""


class Members(Protocol):
    """The instances of a job, and the replicas that this instance drives; `Replicas` is the implementation.

    A loop calls `up_to_date` before each step. If a collective call shows a loss, the loop calls `carry_on` and then
    `replicas_batch`, and repeats the step. `carry_on` replaces the communicator, ranks and local replicas.
    """

    @property
    def kind(self) -> str:
        """The kind of these instances, for messages."""

    @property
    def communicator(self) -> Communicator:
        """The connection of the remaining instances."""

    @property
    def first_index(self) -> int:
        """The index of this instance at the start of the job, which poprun uses in its messages."""

    @property
    def instance_index(self) -> int:
        """The rank of this instance."""

    @property
    def local_replicas(self) -> range:
        """The global indices of the replicas that this instance drives now."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all instances."""

    @property
    def instruments(self) -> Instruments:
        """The instruments attached to this instance."""

    @property
    def sinks(self) -> Sequence[Sinks]:
        """The open sinks of metrics."""

    @property
    def faults(self) -> FaultInjector:
        """The faults that the user has asked to inject into this instance."""

    @property
    def running_programs(self) -> ReplicaPrograms:
        """The programs of the local replicas."""

    @property
    def done_so_far(self) -> InstanceProgress:
        """The progress of this instance."""

    @property
    def can_carry_on(self) -> bool:
        """Whether the job goes on if an instance is lost."""

    def carry_on(self) -> None:
        """Take over the replicas of lost instances, together with the other remaining instances. Collective.

        It repeats itself if more instances are lost meanwhile. Its errors are final.

        Raises:
            LifeCycleError: If the job cannot go on.
        """

    def replicas_batch(self, batch: Batch) -> Batch:
        """Return the batch of the same step for the replicas that this instance drives since `carry_on`.

        Raises:
            StrategyError: If `batch` is not the last batch of a data set of the strategy.
        """

    def up_to_date(self, batch: Batch) -> Batch:
        """Return the batch, or the same step's batch for the present replicas if an instance was lost meanwhile."""
