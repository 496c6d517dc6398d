"""A launch: everything that was decided before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from poprun.cli.settings import LaunchSettings
from poprun.hosts.hosts import Host
from poprun.hosts.remote import Remote
from poprun.launch.placement import InstancePlace
from poprun.launch.variables import InstanceVariables, instance_variables


@dataclass(frozen=True)
class Launch:
    """All that the command depends on.

    Attributes:
        settings: what the user asked for.
        hosts: the machines, in the order of their instances.
        places: where each instance runs.
        mpirun: path of mpirun.
        python: path of the interpreter that runs the agents.
        extra: variables that poprun sets besides POPDIST_*.
        forwarded: variables of the user that are forwarded by name.
        oversubscribes: whether a host has more instances than cores.
        remote: how other hosts are reached; None: nothing leaves this machine.
        mpirun_variables: what mpirun needs in its own environment besides.
    """

    settings: LaunchSettings
    hosts: tuple[Host, ...]
    places: tuple[InstancePlace, ...]
    mpirun: str
    python: str
    extra: dict[str, str]
    forwarded: tuple[str, ...]
    oversubscribes: bool
    remote: Remote | None = None
    mpirun_variables: dict[str, str] = field(default_factory=dict)

    @property
    def leaves_this_machine(self) -> bool:
        """Whether instances run elsewhere than beside poprun."""
        return not all(host.is_this_machine for host in self.hosts)

    @cached_property
    def variables(self) -> tuple[InstanceVariables, ...]:
        """The environment variables of each instance."""
        return instance_variables(self.settings, self.places, self.extra, self.forwarded)


@dataclass(frozen=True)
class Across:
    """The limits and the way to other hosts, for the supervisor of a job.

    Attributes:
        interface: our address that the other hosts reach; "" where there are none.
        silence_s: after which silence a host counts as gone.
        start_timeout_s: how long it may take until all instances have started.
        least: with how many instances the job goes on when others are lost; 0: with all only.
        stuck_timeout_s: how long an instance that others wait for may do nothing; 0: for ever.
        others: the hosts besides this machine.
        ssh: the words of ssh before a host.
    """

    interface: str = ""
    silence_s: float = 10.0
    start_timeout_s: float = 60.0
    least: int = 0
    stuck_timeout_s: float = 0.0
    others: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
