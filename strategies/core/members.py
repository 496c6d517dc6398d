"""The instances of a job, as the loop of steps, evaluations and records see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from collectives import Communicator
from collectives.instruments import Instruments
from popdist.records import FaultInjector
from strategies.sinks.sinks import Sinks
from strategies.typing import Batch


@dataclass
class InstanceProgress:
    """The progress of an instance in the sequence of operations that all instances do together.

    After a loss, instances differ by one operation at most, because every operation needs all of them.

    Attributes:
        done: the number of operations that are complete.
        passes: the number of passes through data sets, without training, that have ended.
        batches: the number of batches of the present pass whose results have arrived; 0 outside of a pass.
        share: hands the result of the last operation to instances that lack it, given a rank that has it. Collective.
            None if they need nothing.
    """

    done: int = 0
    passes: int = 0
    batches: int = 0
    share: Callable[[int], object] | None = None

    def complete(self, share: Callable[[int], object] | None = None) -> None:
        """Note that one more operation is complete on all instances."""
        self.done += 1
        self.share = share


class ReplicaPrograms(Protocol):
    """The running programs of the local replicas. They call back into Python for collectives and feeds."""

    def begin(self) -> None:
        """Drop the remains of programs that have failed half-way."""

    def ending(self) -> AbstractContextManager[None]:
        """End the programs with the block. If the framework hides the error of a callback, raise that error."""


class Members(Protocol):
    """The instances of a job, and the replicas that this one drives; `Replicas` is one."""

    @property
    def kind(self) -> str:
        """The kind of these instances, for messages."""

    @property
    def communicator(self) -> Communicator:
        """Connects the instances that are left."""

    @property
    def first_index(self) -> int:
        """The number of this instance at the start, by which poprun calls it."""

    @property
    def instance_index(self) -> int:
        """The rank of this instance."""

    @property
    def local_replicas(self) -> range:
        """The replicas that this instance drives now."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The replicas of all instances."""

    @property
    def instruments(self) -> Instruments:
        """The instruments attached to this instance."""

    @property
    def sinks(self) -> Sequence[Sinks]:
        """The places where metrics go."""

    @property
    def faults(self) -> FaultInjector:
        """The faults that the user wants in this instance."""

    @property
    def reducer(self) -> ReplicaPrograms:
        """The programs of the local replicas."""

    @property
    def done_so_far(self) -> InstanceProgress:
        """The progress of this instance."""

    @property
    def can_carry_on(self) -> bool:
        """Whether the job goes on where an instance is lost."""

    def carry_on(self) -> None:
        """Take over the replicas of lost instances, together with the other remaining instances. Collective."""

    def replicas_batch(self, batch: Batch) -> Batch:
        """Return the batch of the same step for the replicas that this instance drives since it has carried on."""

    def up_to_date(self, batch: Batch) -> Batch:
        """Return the batch, or that of the same step for the present replicas if an instance was lost since."""
