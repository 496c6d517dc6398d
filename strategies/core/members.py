"""The instances of a job, as everything in this room knows them."""

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

    Where one is lost some may have done what others have not. Nobody is ahead by more than one thing: for the next one
    it needs those who are behind.

    Attributes:
        done: how many things `surviving` has seen it do.
        passes: how often it has gone through a data set without training.
        batches: of the pass in which it is, those of which it knows what all replicas have told; 0 outside of a pass.
        share: hands the result of what it has done last to those who have not done it, given the rank that has it, in a
            collective call; None where they need nothing.
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
    """The running programs of the local replicas, which may call back into Python: collectives and feeds."""

    def begin(self) -> None:
        """Drop what is left of programs that have failed half-way."""

    def ending(self) -> AbstractContextManager[None]:
        """End the programs when the block does; raise what a callback has raised where the framework hides it."""


class Members(Protocol):
    """The instances of a job, and the replicas that this one drives; `strategies.replicas.replicas.Replicas` is one."""

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
        """Go on with those that are left; a collective call of theirs."""

    def replicas_batch(self, batch: Batch) -> Batch:
        """Return the batch of the same step for the replicas that this instance drives since it has carried on."""

    def up_to_date(self, batch: Batch) -> Batch:
        """Return the batch, or that of the same step for the present replicas if an instance was lost since."""
