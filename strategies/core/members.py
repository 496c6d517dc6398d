"""The instances of a job, as the loops of steps, evaluations and records see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from collectives import Communicator
from collectives.instruments import Instruments
from popdist.records.distribution_settings import DistributionSettings
from popdist.records.faults import FaultInjector
from popdist.records.progress import Progress
from strategies.core.journal import InstanceProgress, Journal
from strategies.sinks.sinks import Sinks
from strategies.typing import Batch


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
    def distributions(self) -> DistributionSettings | None:
        """The steps in which norms and histograms are taken; None if never."""

    @property
    def progress(self) -> Progress:
        """The connection to the supervisor of this instance."""

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

    @property
    def is_spare(self) -> bool:
        """Whether this instance waits to take the place of a lost one; it takes part in no collective call."""

    @property
    def journal(self) -> Journal:
        """The results of the operations, for spares."""

    def wait_for_values(self) -> None:
        """Wait on a spare, outside of operations, until its placeholders have values; see `Journal.wait_for_values`."""

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

    def real_batch(self, batch: Batch) -> Batch:
        """Return the batch of the same step with values, on a spare, which gets placeholders from data sets."""

    def position_of(self, batch: Batch) -> Sequence[int] | None:
        """Return the epoch and the step of a batch that a data set has given last; None for any other batch."""

    def up_to_date(self, batch: Batch) -> Batch:
        """Return the batch, or the same step's batch for the present replicas if an instance was lost meanwhile."""

    def refuse_unknown(self, batches: Iterable[Batch]) -> None:
        """Refuse batches without a data set of a strategy after instances were lost or have joined.

        Raises:
            StrategyError: Nobody knows for which replicas the batches are.
        """
