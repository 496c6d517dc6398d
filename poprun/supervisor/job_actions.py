"""What is to be done about a job, as its machine says (`poprun.supervisor.job_machine`)."""

from __future__ import annotations

from dataclasses import dataclass

from poprun.cli.log import Level
from poprun.ipc.facts import Ended


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

    ended: Ended


Action = Order | Show | ShowHiddenErrors | ShowComplaint | Say | StopListening | SendToMpirun | CleanUp | Finish
