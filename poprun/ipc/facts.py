"""Facts about the instances of a job and its end; plain values for the diagnosis."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum

from popdist.records.progress import ProgressRecord


class EndKind(Enum):
    """Kinds of the end of an instance."""

    EXIT = "exit"
    SIGNAL = "signal"
    LOST = "lost"
    """Its agent is gone without a word."""


@dataclass(frozen=True)
class Ending:
    """The end of an instance's program.

    Attributes:
        kind: exit, signal or lost.
        number: the exit status or the signal; 0 when lost.
        at_s: when, on the clock of `time.monotonic`.
        told: whether mpirun or poprun had told it to stop before.
        fault: of one that is lost, what the network said.
        lacked_memory: of one that was killed, whether the kernel did that because memory had run out.
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
        """Whether the program failed and nobody had told it to stop."""
        return not self.is_success and not self.told

    @property
    def exit_status(self) -> int:
        """The exit status of poprun if this is the cause of the failure."""
        if self.kind is EndKind.EXIT:
            return self.number or 1
        return 128 + (self.number or signal.SIGKILL)

    def describe(self) -> str:
        """Return a clause that continues `instance 1 (...)`."""
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
    """The knowledge about one instance.

    Attributes:
        index: the instance.
        host: its machine; empty before it has reported.
        pid: its program; 0 before it has reported.
        ending: None while it runs.
        record: what it noted last.
        is_given_up: whether the others go on without it.
        told_at_s: when its agent was told to stop, by Open MPI or because Open MPI's daemon is gone; 0 if it was not.
        orphaned_at_s: the same time where the daemon, or mpirun itself, which had started the agent, was gone already.
        state: the letter of its process's state, once it was asked for.
        stack: its Python stack, as faulthandler writes it, once it was asked for; empty where it shows none.
        answered_at_s: when its agent has said last what it does; 0 before it has reported.
        stopped_since_s: since when it was seen to be stopped by a signal; 0: it is not.
        effort: a number that grows while its processes use CPU time, as it was seen last; until `popdist.init` only.
        busy_at_s: when that was seen to change last.
        memory_bytes: how much memory it had then; 0 once it has ended.
        peak_memory_bytes: how much it had at most.
    """

    index: int
    host: str = ""
    pid: int = 0
    ending: Ending | None = None
    record: ProgressRecord = field(default_factory=ProgressRecord)
    told_at_s: float = 0.0
    orphaned_at_s: float = 0.0
    is_given_up: bool = False
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
        """The instance with its host and process, as users read it."""
        return f"instance {self.index} on host {self.host or 'unknown'}" + (f" (pid {self.pid})" if self.pid else "")

    @property
    def is_started(self) -> bool:
        """Whether its agent has reported."""
        return self.pid > 0

    @property
    def is_gone(self) -> bool:
        """Whether it will enter no collective any more, without having failed."""
        if self.ending is not None:
            return self.ending.is_success and not self.ending.told
        return self.record.is_leaving


@dataclass(frozen=True)
class Verdict:
    """The outcome of a failed job.

    Attributes:
        instance: the one to blame; None when none is.
        exit_status: poprun's.
        lines: what to tell the user, at most `MOST_LINES` of the diagnosis.
        is_of_hosts: whether no instance failed by itself, but its host, a daemon, mpirun or what connects them.
        lost: the instances that failed, or were lost with their host; empty where none is known to have.
        is_orderly: whether the program ended by itself, as after a signal that asks it to leave.
        is_unexplained: whether mpirun's own words are needed to understand it.
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
        exit_status: poprun's, if this was all.
        was_told: whether the user told it to end, or reads its output no more.
        verdict: why it failed; None: it did not.
    """

    exit_status: int
    was_told: bool
    verdict: Verdict | None


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 99` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
