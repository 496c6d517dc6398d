"""Facts about the instances of a job and about its end: plain values for the diagnosis."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum

from popdist.records.progress import ProgressRecord, State


class EndKind(Enum):
    """A kind of end of an instance."""

    EXIT = "exit"
    SIGNAL = "signal"
    LOST = "lost"
    """The instance's agent disappeared without a message."""


@dataclass(frozen=True)
class Ending:
    """The end of an instance's program.

    Attributes:
        kind: The kind: exit, signal or lost.
        number: The exit status or the signal; 0 if lost.
        at_s: The time of the end, on the clock of `time.monotonic`.
        told: Whether mpirun or poprun had told the instance to stop before.
        fault: The network's error, if the instance is lost.
        lacked_memory: Whether the kernel killed the program because memory had run out.
    """

    kind: EndKind
    number: int
    at_s: float
    told: bool = False
    fault: str = ""
    lacked_memory: bool = False

    @property
    def is_success(self) -> bool:
        """Whether the program ended with exit status 0."""
        return self.kind is EndKind.EXIT and self.number == 0

    @property
    def is_own_failure(self) -> bool:
        """Whether the program failed without being told to stop."""
        return not self.is_success and not self.told

    @property
    def exit_status(self) -> int:
        """The exit status of poprun, if this end is the cause of the failure."""
        if self.kind is EndKind.EXIT:
            return self.number or 1
        return 128 + (self.number or signal.SIGKILL)

    def describe(self) -> str:
        """Describe the end in a clause that continues `instance 1 (...)`."""
        if self.kind is EndKind.EXIT:
            return f"ended with exit status {self.number}"
        if self.kind is EndKind.SIGNAL:
            why = " for lack of memory" if self.lacked_memory else ""
            return f"was killed by {signal_name(self.number)}{why}"
        if self.fault:
            return f"was lost: the connection to its host broke ({self.fault})"
        return "was lost: its supervisor process was killed or cut off"


@dataclass(frozen=True)
class Facts:
    """Everything known about one instance.

    Attributes:
        index: The index of the instance.
        host: The name of its machine; empty before its agent has reported.
        pid: The process of its program; 0 before its agent has reported.
        ending: The end of the program. None while it runs.
        record: The last progress record.
        told_at_s: The time when Open MPI, or the loss of Open MPI's daemon, told its agent to stop; 0 if none did.
        orphaned_at_s: The same time, if the daemon or mpirun that had started the agent was gone already; otherwise 0.
        is_given_up: Whether the others go on without the instance.
        is_spare: Whether it is a spare: no instance's place was given to it yet.
        is_reserve: Whether it is a spare whose program begins only when poprun starts it.
        state: The letter of its process's state; empty before poprun asked for it.
        stack: Its Python stack, as faulthandler writes it; empty before poprun asked for it, or if it shows none.
        answered_at_s: The time of its agent's last progress report; 0 before its agent has reported.
        stopped_since_s: The time since which a signal has stopped the program; 0 if none has.
        effort: A number that grows while its processes use CPU time, measured until `popdist.init`.
        busy_at_s: The time of the last change of `effort`.
        memory_bytes: Its memory at the last report; 0 after the end.
        peak_memory_bytes: Its largest memory.
    """

    index: int
    host: str = ""
    pid: int = 0
    ending: Ending | None = None
    record: ProgressRecord = field(default_factory=ProgressRecord)
    told_at_s: float = 0.0
    orphaned_at_s: float = 0.0
    is_given_up: bool = False
    is_spare: bool = False
    is_reserve: bool = False
    state: str = ""
    stack: str = ""
    answered_at_s: float = 0.0
    stopped_since_s: float = 0.0
    effort: float = 0.0
    busy_at_s: float = 0.0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0

    @property
    def name(self) -> str:
        """The instance with its host and process, as messages name it."""
        return f"{self.short_name} on host {self.host or 'unknown'}" + (f" (pid {self.pid})" if self.pid else "")

    @property
    def short_name(self) -> str:
        """The instance or spare with its number."""
        kind = "reserve" if self.is_reserve else "spare"
        return f"{kind if self.is_spare or self.record.is_spare else 'instance'} {self.index}"

    @property
    def has_variables(self) -> bool:
        """Whether others can get the variables from it: it has trained, or was a spare and has got them."""
        return not (self.is_spare or self.record.is_spare or self.record.lacks_values)

    @property
    def is_at_end(self) -> bool:
        """Whether the instance has left the program, or has agreed with the others that the work is done."""
        return self.record.is_leaving or self.record.state is State.FINISHED

    @property
    def is_asleep(self) -> bool:
        """Whether it is a spare that is connected with the others, which therefore do not need it."""
        return self.is_spare and self.record.has_joined

    @property
    def can_join(self) -> bool:
        """Whether it is a spare that may take an instance's place now."""
        return self.is_asleep and (self.record.is_ready or not self.is_reserve)

    @property
    def is_needed(self) -> bool:
        """Whether its failure concerns the others. That of a sleeping spare does if the spare's host is lost."""
        has_lost_host = self.ending is not None and bool(self.ending.fault)
        return not self.is_given_up and (has_lost_host or not self.is_asleep)

    @property
    def is_started(self) -> bool:
        """Whether the instance's agent has reported."""
        return self.pid > 0

    @property
    def is_gone(self) -> bool:
        """Whether the instance has left in order: it has not failed, and enters no further collective."""
        if self.ending is not None:
            return self.ending.is_success and not self.ending.told
        return self.record.is_leaving


@dataclass(frozen=True)
class Loss:
    """A lost instance or spare without which the job goes on.

    Attributes:
        line: A line about the loss.
        instance: The index of the lost instance or spare.
        was_spare: Whether a spare was lost, perhaps while it joined.
        taken_by: The spare that takes the place of the lost instance. None: the others go on without it.
        by_new: Whether that spare is a new instance, which was started after the loss.
    """

    line: str
    instance: int
    was_spare: bool = False
    taken_by: int | None = None
    by_new: bool = False

    @property
    def followed_by(self) -> str:
        """The reaction: `replace`, `shrink`, or `none` after the loss of a spare."""
        if self.taken_by is not None:
            return "replace"
        return "none" if self.was_spare else "shrink"

    @property
    def is_replaced(self) -> bool:
        """Whether an instance was lost, and a spare takes its place."""
        return self.taken_by is not None and not self.was_spare


@dataclass(frozen=True)
class Carriers:
    """The instances that drive the replicas from some moment on.

    Attributes:
        at_s: The time since the start of this attempt at the job.
        step: The training step at that time; 0 before the first.
        instances: The instances in the order of their replicas.
    """

    at_s: float
    step: int
    instances: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a failed job.

    Attributes:
        instance: The instance that caused the failure. None: no instance did.
        exit_status: The exit status of poprun.
        lines: The message for the user, at most `MOST_LINES` lines of the diagnosis.
        is_unexplained: Whether mpirun's own messages are needed to understand the failure.
        is_of_hosts: Whether no instance failed by itself, but its host, a daemon, mpirun or the network between them.
        lost: The instances that failed, or were lost with their host; empty if none is known.
        is_orderly: Whether the program ended by itself, for example after a signal that asks it to leave.
    """

    instance: int | None
    exit_status: int
    lines: tuple[str, ...]
    is_unexplained: bool = False
    is_of_hosts: bool = False
    lost: tuple[int, ...] = ()
    is_orderly: bool = False


@dataclass(frozen=True)
class JobEnd:
    """The end of a job.

    Attributes:
        exit_status: The exit status of poprun, if no restart follows.
        was_told: Whether the user told the job to end, or closed its output.
        verdict: The reason of the failure. None: the job did not fail.
    """

    exit_status: int
    was_told: bool
    verdict: Verdict | None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`, or `signal 99` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
