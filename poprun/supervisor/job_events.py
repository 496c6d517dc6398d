"""Events of a job, the actions that its machine answers with, and the limits of its waits.

`poprun.supervisor.job_machine` takes events and returns actions; failures.md says what follows from the limits.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from popdist.records.progress import ProgressRecord
from poprun.cli.log import Level
from poprun.ipc import wire
from poprun.ipc.facts import Ending, JobEnd

END_SIGNAL = signal.SIGHUP
"""The signal that makes mpirun end at once, with all that it has started."""
LOOK_S = 0.2
"""The interval at which instances are asked for their progress."""
QUICK_LOOK_S = 0.08
"""The same interval once an instance has ended or is leaving."""
SETTLE_S = 0.06
"""The wait after the first failure, for reports under way, before anyone is blamed."""
SETTLE_LIMIT_S = 0.5
"""The same wait if an instance has not answered yet, as on a machine with too few cores."""
LOST_HOST_SETTLE_S = 0.5
"""The same wait if mpirun has ended before its instances: those on a host without a daemon end one by one."""
EXAMINE_S = 5.0
"""The time in which a stuck instance has to show its stack; its agent waits less long for it."""
LEAVE_S = 0.5
"""The time in which an instance that is to blame, and still in its exit handlers, has to heed its release."""
LEAVE_LIMIT_S = 3.0
"""The time that it may then take to show its exit status."""
TOLD_LIMIT_S = 5.0
"""The time after an agent is told to stop until all others are told, or mpirun has ended."""
INTERRUPT_GRACE_S = 0.9
"""The time in which programs have to end after Ctrl-C or SIGTERM, unless they have asked for more to save."""
GRACE_ANSWER_LIMIT_S = 3.0
"""The time in which instances have to answer, after SIGTERM, how long they need to save."""
CLOSE_LIMIT_S = 0.4
"""The time in which agents have to end what is left of their instances."""
MPIRUN_LIMIT_S = 0.6
"""The time in which mpirun has to end after it was told to; killed, it would leave files behind."""


@dataclass(frozen=True)
class OutputPiece:
    """A piece of what a program has written on descriptor 1 or 2: an event when it comes, an action to show it."""

    instance: int
    descriptor: int
    data: bytes


@dataclass(frozen=True)
class MemberConnected:
    """The agent of an instance has reported: its program runs as `pid` on `host`."""

    instance: int
    pid: int
    host: str


@dataclass(frozen=True)
class ProgressCame:
    """An answer to `Command.ASK`: the instance's progress record, its times on the clock of poprun's host.

    Attributes:
        instance: the instance that answers.
        record: its progress record.
        is_stopped: whether a signal has stopped its program.
        effort: grows while its processes use CPU time, or wait for a core; 0 once it has come to `popdist.init`.
        memory_bytes: its resident memory.
        peak_memory_bytes: its largest resident memory so far.
    """

    instance: int
    record: ProgressRecord
    is_stopped: bool = False
    effort: float = 0.0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class InstanceEnded:
    """The program has ended; all that it has written has come."""

    instance: int
    ending: Ending


class InstanceChange(Enum):
    """Changes of an instance that a name, or a name and a text, describe."""

    TOLD = "Open MPI has told its agent to stop"
    ORPHANED = "mpirun or its daemon, which had started the agent, is gone"
    EXAMINED = "an answer to `Command.EXAMINE`: the letter of the process's state, followed by its Python stack if any"
    CLOSED = "no process of it is left"
    LOST = "the connection to its agent has ended; the text is the fault that the network reports, if any"


@dataclass(frozen=True)
class InstanceChanged:
    """A change of an instance, and the text that belongs to it."""

    instance: int
    change: InstanceChange
    text: str = ""


MemberEvent = MemberConnected | ProgressCame | InstanceEnded | InstanceChanged
"""Events that change the facts of an instance."""


@dataclass(frozen=True)
class SignalCame:
    """A signal to poprun."""

    number: int


@dataclass(frozen=True)
class Tick:
    """The time to decide: all events up to now have been told, and this is the state of the surroundings.

    Attributes:
        mpirun_status: mpirun's exit status, 128 + n after signal n; None while it runs.
        is_mpirun_stopped: whether a signal has stopped mpirun.
        is_behind: whether so much output waits for its reader that instances may have to wait.
        closed: why standard output cannot be written; "" if its reader has gone; None if it can.
    """

    mpirun_status: int | None = None
    is_mpirun_stopped: bool = False
    is_behind: bool = False
    closed: str | None = None


Event = MemberEvent | OutputPiece | SignalCame | Tick


class Command(Enum):
    """Commands to the agent of an instance, by their kind of message; the number of an order is named here."""

    ASK = wire.REPORT
    """Report the progress record."""
    EXAMINE = wire.EXAMINE
    """Show the state and the stack of the program."""
    RELEASE = wire.RELEASE
    """Do not wait for others any more; so many instances are lost."""
    PASS_ON = wire.SIGNAL
    """Send the program this signal."""
    STOP = wire.STOP
    """End what is left of the instance."""


@dataclass(frozen=True)
class AgentOrder:
    """A command to the agent of an instance."""

    command: Command
    instance: int
    number: int = 0


class DeedKind(Enum):
    """Deeds of poprun itself; the number of a deed is named here."""

    STOP_LISTENING = "let nobody else in: every instance has connected"
    SEND_TO_MPIRUN = "send mpirun this signal, if it still runs"
    SHOW_HIDDEN_ERRORS = "show the last errors of this instance, which was silenced"
    SHOW_COMPLAINT = "show mpirun's own words"


@dataclass(frozen=True)
class Deed:
    """A deed of poprun itself."""

    kind: DeedKind
    number: int = 0


@dataclass(frozen=True)
class Say:
    """Say something in poprun's own name."""

    level: Level
    text: str


@dataclass(frozen=True)
class CleanUp:
    """Leave nothing of the job on this machine and, if `sweeps`, on all other hosts but the silent ones."""

    sweeps: bool
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finish:
    """The job is over; nothing follows."""

    ended: JobEnd


Action = AgentOrder | OutputPiece | Deed | Say | CleanUp | Finish
