"""Instances on threads that may be lost at exact points while the others carry on: a job without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar, final

from losing import LIMITS, Lost, meeting_point, run_members

import collectives
import strategies
from collectives import Communicator, PeerLostError, Settings, ThreadHub
from collectives.backends.thread import connect_survivors
from collectives.instruments import Instrument, Instruments
from popdist import Instance
from popdist.records.faults import Fault, FaultInjector, InjectedError, parse_fault
from strategies.defaults import Defaults
from strategies.jax.replicas.processes import Membership

Result = TypeVar("Result")

GUARD_S = 100.0


@dataclass
class Job:
    """The instances of a job on threads.

    Attributes:
        hub: The hub that connects the instances.
        survives: Whether the others carry on after a loss.
        settled: The instances that have ended or stand still.
        all_have_joined: The barrier before which no instance is lost.
    """

    hub: ThreadHub
    survives: bool = True
    settled: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    all_have_joined: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.all_have_joined = meeting_point(self.hub.size)

    def settle(self, instance: int) -> None:
        """Record that an instance has ended or stands still."""
        with self.changed:
            self.settled.add(instance)
            self.changed.notify_all()

    def stand_still(self, instance: int) -> None:
        """Wait until all instances have ended or stand still."""
        self.settle(instance)
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.settled) == self.hub.size, GUARD_S)


@final
class Threads(Membership):
    """Membership of instances on threads, some of which may be lost.

    Args:
        instance: The instance of this thread.
        settings: Settings of its communicators.
        job: The job with the other instances.
        defaults: Defaults of the strategy; None for those of the process.
    """

    def __init__(self, instance: Instance, settings: Settings, job: Job, defaults: Defaults | None = None) -> None:
        self._first = instance
        self._settings = settings
        self._job = job
        super().__init__(defaults=defaults)

    def join(self) -> tuple[Instance, Communicator]:
        """Connect to the other instances, and wait until all have joined."""
        rank = self._first.index
        communicator = collectives.connect("thread", self._settings, hub=self._job.hub, rank=rank)
        self._job.all_have_joined.wait()
        return self._first, communicator

    @property
    def can_carry_on(self) -> bool:
        """Whether the others carry on after a loss."""
        return self._job.survives

    def join_survivors(self) -> tuple[Instance, Communicator]:
        """Connect to the surviving instances."""
        communicator = connect_survivors(self._settings, self._job.hub, self._first.index)
        self.communicator.abandon()
        return self.instance.renumbered(communicator.rank, communicator.size), communicator


@final
class SurvivingStrategy(strategies.Strategy):
    """Strategy of instances on threads that may be lost, as `PopDistStrategy` under poprun.

    Args:
        instance: The instance of this thread.
        settings: Settings of its communicators.
        job: The job with the other instances.
        defaults: Defaults of the strategy; None for those of the process.
    """

    def __init__(self, instance: Instance, settings: Settings, job: Job, defaults: Defaults | None = None) -> None:
        super().__init__(Threads(instance, settings, job, defaults))


@dataclass(frozen=True)
class ThreadFault(Fault):
    """A fault of `poprun --inject` that happens to a thread.

    `kill` and `exit` end the thread. `raise` raises the same error as in a process. `cut` makes the others lose the
    instance while it lives, and its messages fail (shared memory cannot be cut: use a ring). `stop` makes the others
    lose it too; it stands still until all of them have ended, and then continues. `delay` delays nothing.
    """

    job: Job | None = None

    def strike(self) -> None:
        """Let the fault happen."""
        assert self.job is not None
        if self.kind in ("kill", "exit"):
            raise Lost
        if self.kind == "cut":
            self.job.hub.lose(self.instance)
        elif self.kind == "stop":
            self.job.hub.lose(self.instance)
            self.job.stand_still(self.instance)
        elif self.kind != "delay":
            super().strike()

    @classmethod
    def parse(cls, text: str, job: Job) -> ThreadFault:
        """Parse a fault in the form of `--inject`."""
        fault = parse_fault(text)
        return cls(fault.kind, fault.instance, fault.phase, fault.step, job=job)


@dataclass(frozen=True)
class Hook(Fault):
    """A function of a test, called at the point of a fault in the thread of the instance."""

    call: Callable[[], object] = lambda: None

    def strike(self) -> None:
        """Call the function of the test."""
        self.call()


def hook(instance: int, phase: str, step: int, call: Callable[[], object]) -> Hook:
    """Return a hook that calls a function once, when an instance enters a phase of a step."""
    return Hook("delay", instance, phase, step, call=call)


@contextmanager
def ending_if_lost(hub: ThreadHub, rank: int) -> Iterator[None]:
    """End the thread of a rank by `Lost` if a fault has struck it, or if the hub has noticed its loss by itself."""
    try:
        yield
    except InjectedError:
        raise Lost from None
    except PeerLostError:
        present, number = hub.newest(rank)
        if present.why_lost(number):
            raise Lost from None
        raise


def run_instances(
    count: int,
    replicas: int,
    function: Callable[[SurvivingStrategy], Result],
    faults: Sequence[str | Hook] = (),
    *,
    mechanism: str = "window",
    survives: bool = True,
    hub: ThreadHub | None = None,
    instruments: Mapping[int, Instrument] = MappingProxyType({}),
    defaults: Defaults | None = None,
) -> list[Result | None]:
    """Run `function(strategy)` on `count` instances, and return the results in order; a lost instance gives None.

    Args:
        count: The number of instances.
        replicas: The number of replicas of all instances.
        function: The function that each instance runs.
        faults: Faults in the form of `poprun --inject`, or hooks.
        mechanism: The mechanism by which instances exchange arrays.
        survives: Whether the others carry on after a loss.
        hub: The hub that connects the instances; a new one by default.
        instruments: Further instruments, by instance.
        defaults: Defaults of the strategies; None for the defaults of the process.
    """
    job = Job(hub or ThreadHub(count), survives)
    due = [ThreadFault.parse(fault, job) if isinstance(fault, str) else fault for fault in faults]

    def member(rank: int) -> Result | None:
        share = replicas // count
        instance = Instance(rank, count, share, rank * share, replicas, rank)
        injector = FaultInjector([fault for fault in due if fault.instance == rank])
        attached = [injector, *([instruments[rank]] if rank in instruments else [])]
        settings = Settings(mechanism=mechanism, limits=LIMITS, progress=Instruments(*attached))
        try:
            with ending_if_lost(job.hub, rank):
                strategy = SurvivingStrategy(instance, settings, job, defaults)
                result = function(strategy)
                strategy.communicator.close()
            return result
        finally:
            job.settle(rank)

    return run_members(job.hub, member)
