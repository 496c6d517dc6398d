"""The mpirun command: a list of words in the order that the original poprun logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from popdist.environments.poprun import DEVICE, IPUS, LOCAL, LOCAL_INSTANCE, OFFSET, SHRINKS_VARIABLE, TOTAL, UNIFORM
from popdist.records.faults import VARIABLE as FAULTS_VARIABLE
from popdist.timeline.asked import FOLDER_VARIABLE, LIMIT_VARIABLE, PROFILE_VARIABLE, folder_beside
from popdist.timeline.profiles import TORCH, WantedProfile
from poprun.cli.settings import Settings
from poprun.cli.vipu import PARTITION_VARIABLE
from poprun.cli.wording import list_ranges
from poprun.hosts.hosts import Host
from poprun.hosts.remote import Remote, mpirun_options
from poprun.ipc.wire import CONTROL_VARIABLE, HOST_VARIABLE, mark
from poprun.launch.exports import export_options, exports, without_exports
from poprun.launch.metrics import metric_variables
from poprun.launch.placement import Place, names_binding
from poprun.launch.torch_distributed import rank_variables

FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_SILENT = "6"
AGENT = Path(__file__).parents[1] / "agent" / "__main__.py"

_QUIET_AND_INDEPENDENT = {
    # MPI_Finalize must not wait for the others: an instance that fails could not end, and nobody would know.
    "async_mpi_finalize": "1",
    # MPI.Win.Allocate_shared complains about UCX on standard error otherwise (Open MPI 5.0.11).
    "osc": "^ucx",
}
_MANY_TO_A_CORE = {
    # Busy waiting takes the core from the one waited for: 8-32 ms instead of 0.3 ms for a small all-reduce.
    "mpi_yield_when_idle": "1",
}


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

    settings: Settings
    hosts: tuple[Host, ...]
    places: tuple[Place, ...]
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


def build_command(launch: Launch) -> list[str]:
    """The words of the mpirun command: general options, then one application context per instance."""
    moved = _moved_exports(launch)
    words = [launch.mpirun, *_general_options(launch, moved)]
    for place in launch.places:
        separator = [":"] if place.index else []
        words += [*separator, *_application_context(launch, place, moved)]
    return words


def environment_of(launch: Launch, place: Place) -> dict[str, str | None]:
    """What one instance finds set by poprun and by the user's `-x`; None: the value is that of poprun's environment.

    The last `-x` of a name counts, and those of one instance come after those of all. What describes the instance to
    its program is poprun's.
    """
    settings = launch.settings
    of_user = exports((*settings.mpi_global_args, *settings.mpi_args_of(place.index)))
    own: dict[str, str | None] = {**instance_variables(launch, place)}
    return own | dict.fromkeys(launch.forwarded) | {name: of_user[name] for name in of_user if name not in own}


def popdist_variables(settings: Settings, place: Place) -> dict[str, str]:
    """The variables that describe one instance to its program, in the original's order; what is unset is left out."""
    variables = {
        TOTAL: str(settings.num_replicas),
        IPUS: str(settings.ipus_per_replica),
        LOCAL: str(len(place.replicas)),
        UNIFORM: "1",
        OFFSET: str(place.replicas.start),
        LOCAL_INSTANCE: str(place.local_index),
    }
    if settings.executable_cache_path is not None:
        variables["POPDIST_EXECUTABLE_CACHE_PATH"] = settings.executable_cache_path
    if place.device is not None:
        variables[DEVICE] = str(place.device)
    if settings.vipu_partition is not None and settings.uses_partition:
        variables[PARTITION_VARIABLE] = settings.vipu_partition
    return variables


def instance_variables(launch: Launch, place: Place) -> dict[str, str]:
    """All variables that poprun sets for one instance; those that the user exports for it are the user's."""
    exported = exports(launch.settings.mpi_args_of(place.index))
    own = {name: value for name, value in launch.extra.items() if name not in exported}
    injected = {FAULTS_VARIABLE: ";".join(launch.settings.inject)} if launch.settings.inject else {}
    shrinks = {SHRINKS_VARIABLE: "1"} if launch.settings.on_failure == "shrink" else {}
    recorded = _recording_variables(launch.settings) | metric_variables(launch.settings)
    ranks = rank_variables(place, launch.places) if launch.settings.torch_distributed_env else {}
    return popdist_variables(launch.settings, place) | ranks | own | injected | shrinks | recorded


def _recording_variables(settings: Settings) -> dict[str, str]:
    """Where instances record what they do, if they are to."""
    if settings.timeline is None:
        return {}
    limit = {} if settings.timeline_limit is None else {LIMIT_VARIABLE: str(settings.timeline_limit)}
    profile = {} if settings.profile is None else {PROFILE_VARIABLE: settings.profile}
    return {FOLDER_VARIABLE: str(folder_beside(settings.timeline))} | limit | profile


def extra_variables(settings: Settings, pool: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """What poprun sets besides POPDIST_*, unless the user has set it, in the environment or by `-x`.

    Args:
        settings: what the user asked for.
        pool: the setting of XLA's thread pool.
        environ: the user's environment.
    """
    # Output goes through a pipe; without this a Python program's lines would come only when 8 KiB are full.
    defaults = {**pool, "PYTHONUNBUFFERED": "1"}
    if settings.profile is not None and WantedProfile.parse(settings.profile).profiler == TORCH:
        defaults["KINETO_LOG_LEVEL"] = _SILENT  # it says on standard error that it begins, and that it ends
    wanted = {name: value for name, value in defaults.items() if name not in environ}
    if settings.offline_mode:
        wanted["JAX_PLATFORMS"] = "cpu"
    exported = exports((*settings.mpi_global_args, *settings.mpi_local_args))
    return {name: value for name, value in wanted.items() if name not in exported}


def _moved_exports(launch: Launch) -> tuple[str, ...]:
    """What contexts export in place of the general options: of two `-x` of a name mpirun (5.0.11) takes the first."""
    settings = launch.settings
    of_instances = (word for _, words in settings.instance_mpi_local_args for word in words)
    again = {*exports((*settings.mpi_local_args, *of_instances)), *instance_variables(launch, launch.places[0])}
    return tuple(name for name in exports(settings.mpi_global_args) if name in again)


def _general_options(launch: Launch, moved: tuple[str, ...]) -> list[str]:
    settings = launch.settings
    user = settings.all_mpi_args
    words = ["--tag-output"]
    if not names_binding(user):
        words += ["--bind-to", "none", "--oversubscribe"]
    parameters = _QUIET_AND_INDEPENDENT | (_MANY_TO_A_CORE if launch.oversubscribes else {})
    for name, value in parameters.items():
        if name not in user:
            words += ["--mca", name, value]
    if launch.remote is not None:
        words += mpirun_options(launch.remote, user)
    if settings.on_failure == "shrink" and "--with-ft" not in user:
        words += ["--with-ft", "ulfm"]
    words += without_exports(settings.mpi_global_args, moved)
    if settings.allow_run_as_root and "--allow-run-as-root" not in settings.mpi_global_args:
        words.append("--allow-run-as-root")
    return words


def _application_context(launch: Launch, place: Place, moved: tuple[str, ...]) -> list[str]:
    words = ["-np", "1"]
    if launch.leaves_this_machine:
        instances = sum(other.host == place.host for other in launch.places)
        words += ["--host", f"{place.host}:{instances}"]
    settings = launch.settings
    arguments = settings.mpi_args_of(place.index)
    own, environment = instance_variables(launch, place), environment_of(launch, place)
    here = [name for name in (*moved, *exports(arguments)) if name not in own]
    elsewhere = {*here, *exports(settings.mpi_global_args)}
    of_user = {name: environment[name] for name in here}
    alone = _exports_of_first_alone(launch, of_user) if place.index == 0 else {}
    words += export_options({name: environment[name] for name in environment if name in own or name not in elsewhere})
    words += export_options({CONTROL_VARIABLE: None, **_host_check(launch, place)})
    words += export_options({name: value for name, value in of_user.items() if name not in alone})
    words += without_exports(arguments, exports(arguments))
    words += ["/usr/bin/env", *(f"{name}={value}" for name, value in alone.items())] if alone else []
    agent = [launch.python, "-I", "-S", str(AGENT), list_ranges(place.cpus) or "any"]
    return [*words, *agent, *map(mark, settings.program)]


def _host_check(launch: Launch, place: Place) -> dict[str, str | None]:
    """What tells the agent where it has to be, for Open MPI may mix up hosts with like names.

    It is known of all hosts or told to none: mpirun (5.0.11) gives all what the first context exports.
    """
    names = launch.remote.names if launch.remote is not None else {}
    is_known = all(other.host in names for other in launch.places)
    return {HOST_VARIABLE: names[place.host]} if is_known else {}


def _exports_of_first_alone(launch: Launch, exported: Mapping[str, str | None]) -> dict[str, str]:
    """The values that other instances must not get: mpirun (5.0.11) gives all what the first context exports."""
    others = [environment_of(launch, place) for place in launch.places[1:]]
    return {
        name: value
        for name, value in exported.items()
        if value is not None and not all(name in environment for environment in others)
    }
