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
    alone: Communicator | None = None  # the communicator of a spare, which takes part in no work of the others
    role: Role = Role.ACTIVE
    is_ready: bool = True  # whether this process may become active; not while a reserve catches up with the others
    looking: Lock = field(default_factory=Lock)  # held by the thread of a spare that looks for news
    is_chosen: bool = False  # whether this spare is connected with the active instances, and has not joined them yet
    lacks_values: bool = False  # whether this process has been a spare, and has not got the variables of the others yet
    target: int = 0  # the wanted number of active instances
    journal: KeptJournal | None = None  # the results of operations, if the job has spares
    feeding: Feeding | None = None  # on the instance that passes the journal on
    fed: Fed | None = None  # on a spare
    chief: Chief = Chief.AT_WORK
    has_chief_left: bool = False  # whether the chief has finished while this instance continues
    is_first_left: bool = True  # whether this instance is the first survivor
    at_end: Callable[[], None] | None = None  # ends other users of MPI
    at_failure: Callable[[], None] | None = None  # lets a failed process end without waiting
    progress: ProgressPage = ProgressPage()
    attached: Sequence[Instrument] = ()  # instruments that observe this instance
    timeline: Timeline | None = None  # the recording, if the job is recorded
    changes: int = 0  # number of changes of the members so far, the same on all processes that took part in the last
    was_finalized: bool = False
    failed_at: int | None = None  # number of collectives called when the program began to fail
    watches_exit: bool = False

    @property
    def every_communicator(self) -> list[Communicator]:
        """All communicators, in closing order."""
        backend = [each for each in (self.communicator, self.everybody) if each is not None]
        return [*reversed(self.others), *backend]

    @property
    def calls_made(self) -> int:
        """The number of collectives that this process has called."""
        return sum(communicator.calls_made for communicator in self.every_communicator)

    @property
    def has_failed(self) -> bool:
        """Whether the program has failed and has called no collective since."""
        return self.communicator is not None and self.failed_at == self.calls_made

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
        self.alone = self.feeding = self.fed = None
        self.others = []
        self.was_finalized = True


process = Process()
group: ContextVar[Communicator | None] = ContextVar("popdist_group", default=None)
"""The communicator of the instances named by the enclosing `execute_on_instances`."""
