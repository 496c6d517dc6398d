"""What happens to a job, as its machine is told (`poprun.supervisor.job_machine`)."""

from __future__ import annotations

from dataclasses import dataclass

from popdist.records.progress import ProgressRecord
from poprun.ipc.facts import Ending


@dataclass(frozen=True)
class MemberConnected:
    """The agent of an instance has reported: its program runs as `pid` on `host`."""

    instance: int
    pid: int
    host: str


@dataclass(frozen=True)
class ProgressCame:
    """An answer to `Ask`: what the instance has noted last, its times on the clock of poprun's host.

    Attributes:
        instance: whose.
        record: the note.
        is_stopped: whether a signal has stopped its program.
        effort: grows while its processes use CPU time, or wait for a core; 0 once it has come to `popdist.init`.
        memory_bytes: how much of its memory is resident.
        peak_memory_bytes: how much was at most.
    """

    instance: int
    record: ProgressRecord
    is_stopped: bool = False
    effort: float = 0.0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class OutputCame:
    """A piece of what the program has written on descriptor 1 or 2."""

    instance: int
    descriptor: int
    data: bytes


@dataclass(frozen=True)
class InstanceTold:
    """Open MPI has told an agent to stop; `is_orphaned`: what had started it, mpirun or its daemon, is gone."""

    instance: int
    is_orphaned: bool = False


@dataclass(frozen=True)
class InstanceExamined:
    """An answer to `Examine`: the letter of the process's state, and its Python stack if it shows one."""

    instance: int
    state: str
    stack: str = ""


@dataclass(frozen=True)
class InstanceEnded:
    """The program has ended; all that it has written has come."""

    instance: int
    ending: Ending


@dataclass(frozen=True)
class InstanceClosed:
    """No process of the instance is left."""

    instance: int


@dataclass(frozen=True)
class MemberLost:
    """The connection to an agent has ended; `fault` is what the network said, where it said anything."""

    instance: int
    fault: str = ""


MemberEvent = (
    MemberConnected | ProgressCame | InstanceTold | InstanceExamined | InstanceEnded | InstanceClosed | MemberLost
)
"""What changes the facts of an instance."""


@dataclass(frozen=True)
class MpirunEnded:
    """With this exit status, 128 + n after signal n."""

    status: int


@dataclass(frozen=True)
class MpirunStopped:
    """Whether a signal has stopped it."""

    is_stopped: bool


@dataclass(frozen=True)
class SignalCame:
    """To poprun."""

    number: int


@dataclass(frozen=True)
class OutputIsBehind:
    """Whether so much output waits for its reader that instances may have to wait."""

    is_behind: bool


@dataclass(frozen=True)
class StandardOutputClosed:
    """Nobody reads it any more, or it cannot be written because of `fault`."""

    fault: str = ""


@dataclass(frozen=True)
class Tick:
    """All that has come by now has been told: time to decide."""


Event = (
    MemberEvent | OutputCame | MpirunEnded | MpirunStopped | SignalCame | OutputIsBehind | StandardOutputClosed | Tick
)
