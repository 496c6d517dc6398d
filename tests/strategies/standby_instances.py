"""Instances on threads with spares, which take the places of lost ones at exact points: a job without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

import numpy as np
from losing import LIMITS, run_members
from surviving_instances import Hook, Job, ThreadFault, ending_if_lost
from typing_extensions import override

import collectives
import strategies
from collectives import BrokenError, Communicator, PeerLostError, Settings, ThreadHub
from collectives.backends.thread import connect_survivors
from collectives.instruments import Instruments
from popdist import Instance
from popdist.records.faults import FaultInjector
from strategies.core.journal import JournalMember
from strategies.jax.replicas.processes import Membership

Result = TypeVar("Result")

LOOK_S = 0.002
"""The interval at which a spare looks whether the others have lost an instance."""


@dataclass
class StandbyJob(Job):
    """The instances of a job on threads, and its journal.

    Attributes:
        num_active: The wanted number of active instances.
        passed_on: The entries that spares can read.
        has_ended: Set at the end of the job.
        members: The memberships of all threads.
        news: Notified when an entry is passed on, and at the end.
    """

    num_active: int = 1
    passed_on: list[bytes] = field(default_factory=list)
    has_ended: bool = False
    members: list[StandbyThreads] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def pass_on(self, entries: Sequence[bytes]) -> None:
        """Let spares read these entries, and those before them."""
        with self.news:
            self.passed_on += entries[len(self.passed_on) :]
            self.news.notify_all()

    def end(self) -> None:
        """Wake spares for the end of the job."""
        with self.news:
            self.has_ended = True
            self.news.notify_all()


@final
class StandbyThreads(Membership):
    """Membership of active instances and spares on threads.

    Args:
        rank: The number of the thread; spares come last.
        settings: Settings of its communicators.
        job: The job with the other threads.
        replicas: The number of replicas.
    """

    def __init__(self, rank: int, settings: Settings, job: StandbyJob, replicas: int) -> None:
        self._rank = rank
        self._settings = settings
        self._job = job
        self._replicas = replicas
        self._is_spare = rank >= job.num_active
        self._is_chosen = False
        self._lacks_values = self._is_spare
        self._entries: list[bytes] = []  # those that this instance has published, or read as a spare
        self._everybody: Communicator | None = None
        job.members.append(self)
        super().__init__()

    @override
    def join(self) -> tuple[Instance, Communicator]:
        count, share = self._job.num_active, self._replicas // self._job.num_active
        index = min(self._rank, count - 1)
        everybody = collectives.connect("thread", self._settings, hub=self._job.hub, rank=self._rank)
        communicator = self._alone() if self._is_spare else everybody.subgroup(range(count))
        self._everybody = everybody
        self._job.all_have_joined.wait()
        return Instance(index, count, share, index * share, self._replicas, index), communicator

    def _alone(self) -> Communicator:
        return collectives.connect("single", Settings(limits=LIMITS))

    @property
    @override
    def can_carry_on(self) -> bool:
        return True

    @property
    @override
    def journal_member(self) -> JournalMember:
        return self

    def is_spare(self) -> bool:
        return self._is_spare

    @property
    def is_active(self) -> bool:
        """Whether the instance is neither a spare nor lost. Poprun tells spares if no other one is."""
        hub, number = self._job.hub.newest(self._rank)
        return (self._is_chosen or not self._is_spare) and not hub.why_lost(number)

    def keeps_journal(self) -> bool:
        return True

    def may_change(self, is_so: bool, was_so: bool = False) -> None:
        """Nothing but losses changes the members here."""

    def takes_values(self) -> None:
        self._lacks_values = False

    def publish(self, entry: Callable[[], bytes]) -> None:
        assert not self._is_spare
        self._entries.append(entry())
        if self.instance.is_leader:
            self._job.pass_on(self._entries)

    def next_entry(self) -> bytes | None:
        assert self._is_spare
        while True:
            with self._job.news:
                if len(self._entries) < len(self._job.passed_on):
                    self._entries.append(self._job.passed_on[len(self._entries)])
                    return self._entries[-1]
                if self._is_chosen:
                    return None
                if self._job.has_ended:
                    raise SystemExit(0)
                self._job.news.wait(LOOK_S)
            present, number = self._job.hub.newest(self._rank)
            if present.why_not_wait(number, ()) or not any(one.is_active for one in self._job.members):
                self._change_members()

    @override
    def join_survivors(self) -> tuple[Instance, Communicator]:
        if not self._is_chosen:
            self._is_spare = self._is_spare or self._lacks_values
            self._change_members()
        if self._is_chosen:
            self._is_spare = self._is_chosen = False
        communicator = self._communicator
        if self._is_spare:
            return self.instance, communicator
        return self.instance.renumbered(communicator.rank, communicator.size), communicator

    def _change_members(self) -> None:
        """Choose the active instances, and connect them; all threads that are left call this."""
        while True:
            everybody = connect_survivors(self._settings, self._job.hub, self._rank)
            if self._everybody is not None:
                self._everybody.abandon()
            self._everybody = everybody
            try:
                self._take_places(everybody)
                return
            except (PeerLostError, BrokenError):
                continue

    def _take_places(self, everybody: Communicator) -> None:
        wanted, was_spare = self._job.num_active, self._is_spare
        own = np.array([was_spare, self.instance.index, len(self._entries)])
        spare, index, known = everybody.all_gather(own, name="places").T
        if spare.all():
            self._communicator = self._alone()
            self._job.end()
            return
        old = [rank for rank in np.argsort(index, kind="stable") if not spare[rank]][:wanted]
        new = [rank for rank in np.flatnonzero(spare) if len(old) < wanted][: wanted - len(old)]
        active = [int(rank) for rank in (*old, *new)]
        source = max((rank for rank in range(everybody.size) if not spare[rank]), key=lambda rank: known[rank])
        if everybody.rank == source:
            self._job.pass_on(self._entries)
        everybody.barrier(name="the journal is complete")
        is_active = everybody.rank in active
        self._communicator = everybody.subgroup(active) if is_active else self._alone()
        self._is_chosen = was_spare and is_active
        self._is_spare = was_spare or not is_active
        self._lacks_values = self._lacks_values or self._is_spare


@final
class StandbyStrategy(strategies.Strategy):
    """Strategy of instances on threads with spares, as `PopDistStrategy` under poprun."""

    def __init__(self, membership: StandbyThreads) -> None:
        super().__init__(membership)


ASLEEP = "asleep"
"""The result of a spare that has slept to the end of the job."""


def run_with_spares(
    count: int,
    spares: int,
    replicas: int,
    function: Callable[[StandbyStrategy], Result],
    faults: Sequence[str | Hook] = (),
    *,
    mechanism: str = "window",
    hub: ThreadHub | None = None,
    job: StandbyJob | None = None,
) -> list[Result | str | None]:
    """Run `function(strategy)` on active instances and spares, and return the results in the order of the threads.

    Args:
        count: The number of active instances.
        spares: The number of spares.
        replicas: The number of replicas of all active instances.
        function: The function that each instance runs.
        faults: Faults in the form of `poprun --inject`, or hooks; "instance" is the number of a thread.
        mechanism: The mechanism by which instances exchange arrays.
        hub: The hub that connects the threads; a new one by default.
        job: The job of the threads, whose wanted number of instances a hook may change; a new one by default.

    Returns:
        The result of each thread: None if it was lost, `ASLEEP` if it has been a spare to the end, and the `SpareError`
        of a spare that has given up.
    """
    job = job or StandbyJob(hub or ThreadHub(count + spares), num_active=count)
    due = [ThreadFault.parse(fault, job) if isinstance(fault, str) else fault for fault in faults]

    def member(rank: int) -> Result | str | None:
        injector = FaultInjector([fault for fault in due if fault.instance == rank])
        settings = Settings(mechanism=mechanism, limits=LIMITS, progress=Instruments(injector))
        try:
            with ending_if_lost(job.hub, rank):
                strategy = StandbyStrategy(StandbyThreads(rank, settings, job, replicas))
                result = function(strategy)
                assert not strategy.replicas.is_spare, "a spare has reached the end of the program"
                strategy.communicator.close()
            job.end()
            return result
        except SystemExit as error:
            return ASLEEP if error.code == 0 else f"exit status {error.code}"
        except strategies.SpareError as error:
            job.hub.lose(rank)
            return error
        except Exception:
            job.end()
            raise
        finally:
            job.settle(rank)

    try:
        return run_members(job.hub, member)
    finally:
        job.end()
