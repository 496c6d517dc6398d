"""The state of this process: its instance, and its connections with the other instances."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Lock
from typing import TYPE_CHECKING

from popdist.environments.detection import detect_instance
from popdist.environments.poprun import process_index
from popdist.environments.tf_config import Cluster
from popdist.instance import Instance
from popdist.membership.standby import Fed, Feeding, KeptJournal
from popdist.records.faults import FaultInjector, due_faults
from popdist.records.metric_words import PROMETHEUS, words_in
from popdist.records.progress import ProgressPage, Role
from popdist.records.watched import Waits
from popdist.timeline.asked import TimelineOptions

if TYPE_CHECKING:
    from collectives import Communicator, Settings
    from collectives.instruments import Instrument
    from popdist.timeline.attaching import Timeline

ConnectBackend = Callable[["Settings", Instance], "Communicator"]


class Chief(Enum):
    """The state of the chief, the instance that prints and writes for all of them."""

    AT_WORK = auto()  # instance 0 by the current numbering
    DONE = auto()  # it has finished its program
    LOST = auto()  # it was lost before its end, when no other instance was left to replace it


@dataclass
class MemberState:
    """State of this process as a member of its job.

    Attributes:
        role: Its role.
        is_ready: Whether it may become active; not while a reserve catches up with the others.
        looking: Lock of the thread of a spare that looks for news.
        is_chosen: Whether this spare is connected with the active instances, and has not joined them yet.
        lacks_values: Whether it has been a spare, and has not got the variables of the others yet.
        target: Wanted number of active instances.
        journal: Results of operations, if the job has spares.
        feeding: Connection to the spares, on the instance that passes the journal on.
        fed: On a spare, the journal that arrives.
        alone: Communicator of a spare, which takes part in no work of the others.
        chief: State of the chief.
        has_chief_left: Whether the chief has finished while this instance continues.
        is_first_left: Whether this instance is the first survivor.
        changes: Number of changes of the members so far, the same on all processes that took part in the last.
    """

    role: Role = Role.ACTIVE
    is_ready: bool = True
    looking: Lock = field(default_factory=Lock)
    is_chosen: bool = False
    lacks_values: bool = False
    target: int = 0
    journal: KeptJournal | None = None
    feeding: Feeding | None = None
    fed: Fed | None = None
    alone: Communicator | None = None
    chief: Chief = Chief.AT_WORK
    has_chief_left: bool = False
    is_first_left: bool = True
    changes: int = 0


@dataclass
class Process:
    """The state of this process."""

    connect: ConnectBackend | None = None
    is_default: bool = False  # whether the backend is the default one, over MPI
    num_replicas: int | None = None
    cluster: Cluster | None = None  # given by the program instead of its environment
    workers_go_on: bool = False  # whether the workers of a cluster go on if one is lost
    instance: Instance | None = None
    communicator: Communicator | None = None
    others: list[Communicator] = field(default_factory=list)  # connect the same instances over other transports
    everybody: Communicator | None = None  # connects all processes, if some of them are not active
    progress: ProgressPage = ProgressPage()
    attached: Sequence[Instrument] = ()  # instruments that observe this instance
    timeline: Timeline | None = None  # the recording, if the job is recorded
    was_finalized: bool = False

    @property
    def every_communicator(self) -> list[Communicator]:
        """All communicators, in closing order."""
        backend = [each for each in (self.communicator, self.everybody) if each is not None]
        return [*reversed(self.others), *backend]

    @property
    def calls_made(self) -> int:
        """The number of collectives that this process has called."""
        return sum(communicator.calls_made for communicator in self.every_communicator)

    def detect(self) -> Instance:
        """Return the instance that the program or the environment describes."""
        if self.cluster is not None:
            return self.cluster.instance(self.num_replicas)
        return detect_instance(os.environ, self.num_replicas)

    def attach(self, progress: ProgressPage, instance: Instance) -> None:
        """Attach the observers of this instance: supervisor, recording, and requested faults.

        Raises:
            EnvironmentMismatchError: The variable of an observer cannot be read.
        """
        attached: list[Instrument] = [progress] if progress.is_supervised else []
        if asked := TimelineOptions.from_environ(os.environ):
            from popdist.timeline.attaching import Timeline  # loads numpy

            self.timeline = Timeline(asked, instance, os.environ)
            attached += self.timeline.instruments
        if any(word.kind == PROMETHEUS for word in words_in(os.environ)):
            attached.append(Waits())
        if faults := due_faults(os.environ, process_index(os.environ, instance)):
            attached.append(FaultInjector(faults, progress.cut_off))
        self.progress, self.attached = progress, attached

    def settings(self) -> Settings:
        """Return the settings for connecting the instances."""
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

    def refuse_in_child(self) -> None:
        """Raise `ForkedProcessError` in a forked child of an instance."""
        if self.communicator is not None:
            self.communicator.refuse_in_child()

    def forget_backend(self) -> None:
        """Note that the backend is gone for good."""
        self.communicator = self.everybody = self.connect = None
        member.alone = member.feeding = member.fed = None
        self.others = []
        self.was_finalized = True


process = Process()
member = MemberState()
group: ContextVar[Communicator | None] = ContextVar("popdist_group", default=None)
"""The communicator of the instances named by the enclosing `execute_on_instances`."""
