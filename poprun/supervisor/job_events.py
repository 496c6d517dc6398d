"""Events of a job, the actions that its machine returns, and the limits of its waits.

`poprun.supervisor.job_machine` takes events and returns actions; failures.md describes the effect of the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from popdist.records.progress import ProgressRecord
from poprun.cli.log import Level
from poprun.ipc import wire
from poprun.ipc.facts import Ending, JobEnd
from poprun.ipc.resizes import ResizeAnswer, ResizeRequest

LOOK_S = 0.2
"""The interval at which instances are asked for their progress."""
QUICK_LOOK_S = 0.08
"""The shorter interval of these questions after an instance has ended or begun to leave."""
SETTLE_S = 0.06
"""The wait between the first failure and the choice of the instance to blame; other reports may be under way."""
SETTLE_LIMIT_S = 0.5
"""The limit of this wait if an instance has not answered yet, for example on a machine with too few cores."""
LOST_HOST_SETTLE_S = 0.5
"""The length of this wait if mpirun has ended first: instances on a host without a daemon end one by one."""
EXAMINE_S = 5.0
"""The time limit for a stuck instance to show its stack; its agent gives up earlier."""
LEAVE_S = 0.5
"""The time limit for a blamed instance to obey its release, if it runs its exit handlers."""
LEAVE_LIMIT_S = 3.0
"""The further time for that instance to end with an exit status."""
TOLD_LIMIT_S = 5.0
"""After one agent is told to stop, the time limit for all others to be told, or for mpirun to end."""
INTERRUPT_GRACE_S = 0.9
"""The time limit for programs to end after Ctrl-C or SIGTERM, unless they have asked for more time to save."""
GRACE_ANSWER_LIMIT_S = 3.0
"""The time limit for instances to answer, after SIGTERM or SIGINT, how long they need to save."""
CLOSE_LIMIT_S = 0.4
"""The time limit for agents to end the remaining processes of their instances."""
SPARE_LIMIT_S = 5.0
"""The time limit for spares to end by themselves after all instances have completed."""
MPIRUN_LIMIT_S = 0.6
"""The time limit for mpirun to end after a signal; if it were killed, it would leave files behind."""


@dataclass(frozen=True)
class OutputPiece:
    """A piece of a program's output on descriptor 1 or 2: an event when it comes, an action that shows it."""

    instance: int
    descriptor: int
    data: bytes


@dataclass(frozen=True)
class MemberConnected:
    """An agent's first report: the program of its instance runs as `pid` on `host`."""

    instance: int
    pid: int
    host: str


@dataclass(frozen=True)
class ProgressCame:
    """An answer to `Command.ASK`: the instance's progress record, with times on the clock of poprun's host.

    Attributes:
        instance: The index of the instance that answers.
        record: Its progress record.
        is_stopped: Whether a signal has stopped its program.
        effort: A number that grows while its processes use CPU time or wait for a core; 0 after `popdist.init` was
            reached.
        memory_bytes: Its resident memory.
        peak_memory_bytes: Its largest resident memory so far.
    """

    instance: int
    record: ProgressRecord
    is_stopped: bool = False
    effort: float = 0.0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class InstanceEnded:
    """The end of an instance's program; all of its output has come before."""

    instance: int
    ending: Ending


class InstanceChange(Enum):
    """Kinds of changes in `InstanceChanged`; EXAMINED and LOST come with a text."""

    TOLD = "Open MPI has told its agent to stop"
    ORPHANED = "the agent's parent, mpirun or its daemon, is gone"
    EXAMINED = "an answer to `Command.EXAMINE`: the letter of the process's state, followed by its Python stack if any"
    CLOSED = "all its processes are gone"
    NOTICED = "SIGUSR1 has told its agent that its host is about to go away"
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
class ResizeAsked:
    """A request of `poprun resize`; `asker` is the number of its connection."""

    asker: int
    request: ResizeRequest


@dataclass(frozen=True)
class Tick:
    """The moment to decide: all events so far have been passed on. It carries the state of mpirun and of the output.

    Attributes:
        mpirun_status: mpirun's exit status, 128 + n after signal n; None while it runs.
        is_mpirun_stopped: Whether a signal has stopped mpirun.
        is_behind: Whether so much output is unread that instances may have to wait.
        closed: Why standard output cannot be written; "" if its reader has gone; None if it can be written.
    """

    mpirun_status: int | None = None
    is_mpirun_stopped: bool = False
    is_behind: bool = False
    closed: str | None = None


Event = MemberEvent | OutputPiece | SignalCame | ResizeAsked | Tick


class Command(Enum):
    """Commands to an agent, by their kind of message. The texts explain `AgentOrder.number`, if the command uses it."""

    ASK = wire.REPORT
    """Report the progress record."""
    EXAMINE = wire.EXAMINE
    """Show the state and the stack of the program."""
    RELEASE = wire.RELEASE
    """Do not wait for other instances any more; the number counts the lost instances."""
    WANT_ACTIVE = wire.WANT_ACTIVE
    """Write the wish about the active instances into the progress page; the number is the packed wish."""
    BEGIN = wire.BEGIN
    """Begin the program of a reserve."""
    CALL = wire.CALL
    """Take part in the change of the members that another process has begun; the number is that of the wish."""
    PASS_ON = wire.SIGNAL
    """Send the program a signal; the number is the signal's."""
    STOP = wire.STOP
    """End all remaining processes of the instance."""


@dataclass(frozen=True)
class AgentOrder:
    """A command to the agent of an instance; `number` depends on the command."""

    command: Command
    instance: int
    number: int = 0


class DeedKind(Enum):
    """Deeds of poprun itself. The texts explain `Deed.number`, if the deed uses it."""

    STOP_LISTENING = "close the socket for agents: every instance has connected"
    SEND_TO_MPIRUN = "send mpirun this signal, if mpirun still runs"
    SHOW_HIDDEN_ERRORS = "show the last errors of this instance, whose output is hidden"
    SHOW_COMPLAINT = "show mpirun's own messages"


@dataclass(frozen=True)
class Deed:
    """A deed of poprun itself; `number` depends on the kind."""

    kind: DeedKind
    number: int = 0


@dataclass(frozen=True)
class Say:
    """A message of poprun itself."""

    level: Level
    text: str


@dataclass(frozen=True)
class Answer:
    """The answer to the asker of a resize."""

    asker: int
    answer: ResizeAnswer


@dataclass(frozen=True)
class CleanUp:
    """Removal of the job's processes and files here and, if `sweeps`, on all other hosts except the `silent` ones."""

    sweeps: bool
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finish:
    """The end of the job, and the last action."""

    ended: JobEnd


Action = AgentOrder | OutputPiece | Deed | Say | Answer | CleanUp | Finish
