"""A launch, the value with all decisions before the start; and its mpirun command, as the original logs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from poprun.cli.mpi_arguments import export_options
from poprun.cli.settings import LaunchSettings
from poprun.cli.wording import count, list_ranges
from poprun.hosts.hosts import Host
from poprun.ipc.wire import CONTROL_VARIABLE, HOST_VARIABLE, mark
from poprun.launch.placement import InstancePlace
from poprun.launch.variables import InstanceVariables, instance_variables

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`: `typing` takes too long to load before mpirun starts
if TYPE_CHECKING:
    from poprun.hosts.remote import Remote

_MANY = 1 << 20  # for hosts whose cores are unknown
AGENT = Path(__file__).parents[1] / "agent" / "__main__.py"

_QUIET_AND_INDEPENDENT = {
    # MPI_Finalize must not wait for the others: a failed instance could not end, and poprun would not notice.
    "async_mpi_finalize": "1",
    # Otherwise MPI.Win.Allocate_shared prints complaints about UCX on standard error (Open MPI 5.0.11).
    "osc": "^ucx",
}
_MANY_TO_A_CORE = {
    # Busy waiting takes the core from the awaited instance: 8-32 ms instead of 0.3 ms for a small all-reduce.
    "mpi_yield_when_idle": "1",
}


@dataclass(frozen=True)
class Launch:
    """All decisions that the mpirun command depends on.

    Attributes:
        settings: The options of the user.
        hosts: The machines, in the order of their instances.
        places: The place of each instance.
        mpirun: Path of mpirun.
        python: Path of the interpreter that runs the agents.
        extra: Variables that poprun sets besides POPDIST_*.
        forwarded: Names of the user's variables that mpirun forwards.
        oversubscribes: Whether a host has more instances than cores.
        remote: The way to other hosts. None: all instances run on this machine.
        mpirun_variables: Variables that mpirun itself needs in addition.
        cores: The number of usable cores of each host, where it is known.
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
    cores: Mapping[str, int] = field(default_factory=dict)

    @property
    def leaves_this_machine(self) -> bool:
        """Whether instances run on other machines than poprun's."""
        return not all(host.is_this_machine for host in self.hosts)

    @property
    def crowding(self) -> str:
        """A warning about hosts with more instances than cores; "" if there are none, or the user asks for it.

        Spares count for nothing: they are idle until they take an instance's place.
        """
        if "--oversubscribe" in self.settings.mpi.words:
            return ""
        instances = Counter(place.host for place in self.places if not place.is_spare)
        crowded = {host: self.cores[host] for host in instances if instances[host] > self.cores.get(host, _MANY)}
        if not crowded:
            return ""
        facts = [f"{instances[host]} instances on {count(cores, 'core')} of {host}" for host, cores in crowded.items()]
        most = min(
            min(instances[host], self.cores.get(host, _MANY)) for host in instances
        )  # all hosts get equal shares
        replicas = self.settings.num_replicas
        fitting = [each * len(instances) for each in range(1, most + 1) if replicas % (each * len(instances)) == 0]
        way_out = f"--num-instances {fitting[-1]} --num-replicas {replicas}" if fitting else "fewer instances"
        return (
            f"{', '.join(facts)}: instances that share a core wait for each other in every step; use {way_out}, which "
            "does not change the bits that a strategy trains"
        )

    @cached_property
    def variables(self) -> tuple[InstanceVariables, ...]:
        """The environment variables of each instance."""
        return instance_variables(self.settings, self.places, self.extra, self.forwarded)


@dataclass(frozen=True)
class Across:
    """The limits for other hosts, and the way to them, for the supervisor of a job.

    Attributes:
        interface: This machine's address that the other hosts reach. Empty without other hosts.
        silence_s: Seconds of silence after which a host counts as lost.
        start_timeout_s: Seconds within which all instances have to start.
        spares: Number of spares.
        least: Smallest number of instances to continue with after a loss. 0: a loss ends the job.
        reserves: Number of these spares that are reserves.
        most_new: Largest number of new instances in the places of lost ones.
        first_pause_s: Seconds before the first new instance; each further pause is twice as long.
        replicas: Number of replicas. 0: unknown.
        tells_notice: Whether SIGUSR1 to an agent means that its host is to be left.
        stuck_timeout_s: Seconds for which an instance that others wait for may be idle. 0: no limit.
        others: The hosts besides this machine, as the user wrote them.
        names: The name that each host's kernel has, under the name that the user wrote; only where it is known.
        ssh: The words of ssh before the host.
    """

    interface: str = ""
    silence_s: float = 10.0
    start_timeout_s: float = 60.0
    spares: int = 0
    reserves: int = 0
    most_new: int = 0
    first_pause_s: float = 0.0
    least: int = 0
    replicas: int = 0
    tells_notice: bool = False
    stuck_timeout_s: float = 0.0
    others: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    ssh: tuple[str, ...] = ()

    def others_called(self, kernel_names: Collection[str]) -> frozenset[str]:
        """Return the other hosts whose kernels have one of these names; agents report their kernel's name."""
        return frozenset(host for host in self.others if self.names.get(host, host) in kernel_names)


def build_command(launch: Launch) -> list[str]:
    """Return the words of the mpirun command: general options, then one application context for each instance.

    A general export moves into the contexts if poprun or one instance sets it again there: if two `-x` name the same
    variable, mpirun (5.0.11) takes the first.
    """
    settings = launch.settings
    again = {*launch.variables[0].own}.union(*(one.exports for one in settings.mpi.instances))
    moved = tuple(name for name in settings.mpi.everywhere.exports if name in again)
    words = [launch.mpirun, *_general_options(launch, moved)]
    program = [mark(word) for word in settings.program]
    on_host = Counter(place.host for place in launch.places) if launch.leaves_this_machine else {}
    for place in launch.places:
        words += [":"] if place.index else []
        words += ["-np", "1"]
        words += ["--host", f"{place.host}:{on_host[place.host]}"] if on_host else []
        words += _exports_and_options(launch, place, moved)
        words += [launch.python, "-I", "-S", str(AGENT), list_ranges(place.cpus) or "any", *program]
    return words


def _general_options(launch: Launch, moved: tuple[str, ...]) -> list[str]:
    settings = launch.settings
    user = settings.mpi.words
    words = ["--tag-output"]
    if not settings.mpi.names_binding:
        words += ["--bind-to", "none", "--oversubscribe"]
    parameters = _QUIET_AND_INDEPENDENT | (_MANY_TO_A_CORE if launch.oversubscribes else {})
    for name, value in parameters.items():
        if name not in user:
            words += ["--mca", name, value]
    if launch.remote is not None:
        from poprun.hosts.remote import mpirun_options  # only jobs on other hosts need it

        words += mpirun_options(launch.remote, user)
    if settings.carries_on and "--with-ft" not in user:
        words += ["--with-ft", "ulfm"]
    words += settings.mpi.everywhere.without_exports(moved)
    if settings.allow_run_as_root and "--allow-run-as-root" not in settings.mpi_global_args:
        words.append("--allow-run-as-root")
    return words


def _exports_and_options(launch: Launch, place: InstancePlace, moved: tuple[str, ...]) -> list[str]:
    """Return the words of one application context up to the agent."""
    arguments, variables = launch.settings.mpi.of(place.index), launch.variables[place.index]
    own, every = variables.own, variables.every
    here = [name for name in (*moved, *arguments.exports) if name not in own]
    elsewhere = {*here, *launch.settings.mpi.everywhere.exports}
    alone = _exports_of_first_alone(launch, here) if place.index == 0 else {}
    words = export_options(
        {name: value for name, value in every.items() if name in own or name not in elsewhere},
        {CONTROL_VARIABLE: None, **_host_check(launch, place)},
        {name: every[name] for name in here if name not in alone},
    )
    words += arguments.without_exports(arguments.exports)
    return [*words, "/usr/bin/env", *(f"{name}={value}" for name, value in alone.items())] if alone else words


def _host_check(launch: Launch, place: InstancePlace) -> dict[str, str | None]:
    """Return the variable that tells the agent its host, because Open MPI may confuse hosts with similar names.

    Unless all hosts' names are known, no agent is told: mpirun (5.0.11) gives the first context's exports to all.
    """
    names = launch.remote.names if launch.remote is not None else {}
    is_known = all(other.host in names for other in launch.places)
    return {HOST_VARIABLE: names[place.host]} if is_known else {}


def _exports_of_first_alone(launch: Launch, names: Sequence[str]) -> dict[str, str]:
    """Return the values that only instance 0 may get: mpirun (5.0.11) gives the first context's exports to all."""
    first, *others = (each.every for each in launch.variables)
    return {
        name: value
        for name in names
        if (value := first[name]) is not None and not all(name in variables for variables in others)
    }
