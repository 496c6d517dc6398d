"""Events of a job, the actions that its machine answers with, and the limits of its waits."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from popdist.records.progress import ProgressRecord
from poprun.cli.log import Level
from poprun.ipc.facts import Ending, JobEnd


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


@dataclass(frozen=True)
class Ask:
    """Ask an instance what it does."""

    instance: int


@dataclass(frozen=True)
class Examine:
    """Have an instance show its state and its stack."""

    instance: int


@dataclass(frozen=True)
class Release:
    """Tell an instance that so many are lost that to wait for the others is of no use any more."""

    instance: int
    lost: int


@dataclass(frozen=True)
class PassOn:
    """Send a signal to the program of an instance."""

    instance: int
    number: int


@dataclass(frozen=True)
class Stop:
    """End what is left of an instance."""

    instance: int


Order = Ask | Examine | Release | PassOn | Stop
"""What the agent of an instance is told."""


@dataclass(frozen=True)
class Show:
    """Show output of an instance."""

    instance: int
    descriptor: int
    data: bytes


@dataclass(frozen=True)
class ShowHiddenErrors:
    """Show the last errors of an instance that was silenced."""

    instance: int


@dataclass(frozen=True)
class ShowComplaint:
    """Show mpirun's own words."""


@dataclass(frozen=True)
class Say:
    """Say something in poprun's own name."""

    level: Level
    text: str


@dataclass(frozen=True)
class StopListening:
    """Every instance has connected: let nobody else in."""


@dataclass(frozen=True)
class SendToMpirun:
    """Send mpirun a signal, if it still runs."""

    number: int


@dataclass(frozen=True)
class CleanUp:
    """Leave nothing of the job: on this machine, and where `sweeps` also on other hosts but the silent ones."""

    sweeps: bool
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finish:
    """The job is over; nothing follows."""

    ended: JobEnd


Action = Order | Show | ShowHiddenErrors | ShowComplaint | Say | StopListening | SendToMpirun | CleanUp | Finish


END_SIGNAL = signal.SIGHUP
"""Tells mpirun to end at once, with all that it has started."""
LOOK_S = 0.2
"""How often instances are asked what they do."""
QUICK_LOOK_S = 0.08
"""The same once an instance has ended or is leaving."""
SETTLE_S = 0.06
"""After the first failure: how long reports under way are waited for before anyone is blamed."""
SETTLE_LIMIT_S = 0.5
"""The same where an instance has not answered yet what it does, as on a machine with too few cores."""
LOST_HOST_SETTLE_S = 0.5
"""The same where mpirun has ended before its instances: those on a host whose daemon is gone end by and by."""
EXAMINE_S = 5.0
"""How long an instance that is stuck may take to show where; its agent waits less long for it."""
LEAVE_S = 0.5
"""How long an instance that is to blame and still in its exit handlers may take to heed that it is released."""
LEAVE_LIMIT_S = 3.0
"""How long it may then take to show its exit status."""
TOLD_LIMIT_S = 5.0
"""How long it may take until all others are told to stop, or mpirun has ended, once an agent was told to."""
INTERRUPT_GRACE_S = 0.9
"""How long programs may take to end after Ctrl-C or SIGTERM, unless they have said that they need longer to save."""
CLOSE_LIMIT_S = 0.4
"""How long agents may take to end what is left of their instances."""
MPIRUN_LIMIT_S = 0.6
"""How long mpirun may take to end after it was told to; killed, it would leave files behind."""
