"""The state of this process: which instance it is, and what connects it with the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from popdist.environments import Cluster, detect_instance
from popdist.instance import Instance
from popdist.records import FaultInjector, NoProgress, Progress, ProgressPage, Waits, due_faults
from popdist.records.metric_words import PROMETHEUS, words_in
from popdist.timeline.asked import TimelineOptions

if TYPE_CHECKING:
    from collectives import Communicator, Settings
    from collectives.instruments import Instrument
    from popdist.timeline.attaching import Timeline

ConnectBackend = Callable[["Settings", Instance], "Communicator"]


class Chief(Enum):
    """The state of the instance that prints and writes for all of them."""

    AT_WORK = auto()  # instance 0, whoever that is when others are lost
    DONE = auto()  # it has come to its end
    LOST = auto()  # before its end, when nobody was left to take its place


@dataclass
class Process:
    """The state of this process."""

    connect: ConnectBackend | None = None
    is_default: bool = False  # whether it is the default backend, over MPI
    num_replicas: int | None = None
    cluster: Cluster | None = None  # named by the program instead of its environment
    instance: Instance | None = None
    communicator: Communicator | None = None
    others: list[Communicator] = field(default_factory=list)  # of the same instances, over something else
    with_leavers: Communicator | None = None  # of these and of those who have come to their end
    chief: Chief = Chief.AT_WORK
    has_chief_left: bool = False  # at its end, while this instance carries on
    is_first_left: bool = True  # of those who are left
    at_end: Callable[[], None] | None = None  # ends what else runs on MPI
    at_failure: Callable[[], None] | None = None  # has this process end without it
    progress: Progress = NoProgress()
    attached: Sequence[Instrument] = ()  # see what this instance does
    timeline: Timeline | None = None  # where the job is recorded
    was_finalized: bool = False
    failed_at: int | None = None  # how many collectives had been called when the program began to fail
    watches_exit: bool = False

    @property
    def every_communicator(self) -> list[Communicator]:
        """All communicators, in the order in which they are closed."""
        backend = [each for each in (self.communicator, self.with_leavers) if each is not None]
        return [*reversed(self.others), *backend]

    @property
    def calls_made(self) -> int:
        """The number of collectives that have been called."""
        return sum(communicator.calls_made for communicator in self.every_communicator)

    @property
    def has_failed(self) -> bool:
        """Whether the program has failed, and has called no collective since then."""
        return self.communicator is not None and self.failed_at == self.calls_made

    def detect(self) -> Instance:
        """Return what the program or the environment says that this instance is."""
        if self.cluster is not None:
            return self.cluster.instance(self.num_replicas)
        return detect_instance(os.environ, self.num_replicas)

    def attach(self, progress: ProgressPage | NoProgress, instance: Instance) -> None:
        """Have others see what this instance does: the supervisor, what records it, faults that are wanted.

        Raises:
            EnvironmentMismatchError: a variable for one of them cannot be read.
        """
        attached: list[Instrument] = [progress] if isinstance(progress, ProgressPage) else []
        if asked := TimelineOptions.from_environ(os.environ):
            from popdist.timeline.attaching import Timeline  # loads numpy

            self.timeline = Timeline(asked, instance, os.environ)
            attached += self.timeline.instruments
        if any(word.kind == PROMETHEUS for word in words_in(os.environ)):
            attached.append(Waits())
        if faults := due_faults(os.environ, instance.index):
            attached.append(FaultInjector(faults, progress.cut_off))
        self.progress, self.attached = progress, attached

    def settings(self) -> Settings:
        """With which instances are connected."""
        from collectives import Settings
        from collectives.instruments import Instruments
        from popdist.tuning import read_limits, read_mechanism, read_network

        instruments = Instruments(*self.attached, supervisor=self.progress)
        return Settings(
            progress=instruments,
            limits=read_limits(os.environ),
            mechanism=read_mechanism(os.environ),
            network=read_network(os.environ),
        )

    def forget_backend(self) -> None:
        """There is none any more, and there will be none."""
        self.communicator = self.with_leavers = self.connect = None
        self.others = []
        self.was_finalized = True


process = Process()
group: ContextVar[Communicator | None] = ContextVar("popdist_group", default=None)
"""The communicator of the instances that are named where the program is."""
