"""What is known about the instances of a job; plain values for the diagnosis."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum

from popdist.environments.progress import ProgressRecord


class EndKind(Enum):
    """How an instance came to its end."""

    EXIT = "exit"
    SIGNAL = "signal"
    LOST = "lost"
    """Its shim is gone without a word."""


@dataclass(frozen=True)
class Ending:
    """The end of an instance's program.

    Attributes:
        kind: exit, signal or lost.
        number: the exit status or the signal; 0 when lost.
        at_s: when, on the clock of `time.monotonic`.
        told: whether mpirun or poprun had told it to stop before.
    """

    kind: EndKind
    number: int
    at_s: float
    told: bool = False

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
        """What poprun ends with when this is the cause of the failure."""
        if self.kind is EndKind.EXIT:
            return self.number or 1
        return 128 + (self.number or signal.SIGKILL)

    def describe(self) -> str:
        """A clause that continues `instance 1 (...)`."""
        if self.kind is EndKind.EXIT:
            return f"ended with exit status {self.number}"
        if self.kind is EndKind.SIGNAL:
            return f"was killed by {signal_name(self.number)}"
        return "was lost: its supervisor process is gone, most probably killed by SIGKILL"


@dataclass(frozen=True)
class Facts:
    """What is known about one instance.

    Attributes:
        index: the instance.
        host: its machine; empty before it has reported.
        pid: its program; 0 before it has reported.
        ending: None while it runs.
        record: what it noted last.
    """

    index: int
    host: str = ""
    pid: int = 0
    ending: Ending | None = None
    record: ProgressRecord = field(default_factory=ProgressRecord)

    @property
    def name(self) -> str:
        """What the user reads: instance, host and process."""
        return f"instance {self.index} on host {self.host or 'unknown'}" + (f" (pid {self.pid})" if self.pid else "")

    @property
    def is_started(self) -> bool:
        """Whether its shim has reported."""
        return self.pid > 0

    @property
    def is_gone(self) -> bool:
        """Whether it will enter no collective any more, without having failed."""
        if self.ending is not None:
            return self.ending.is_success and not self.ending.told
        return self.record.is_leaving


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 99` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
