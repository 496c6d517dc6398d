"""The mpirun command: a list of words in the order that the original poprun logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poprun.cores import format_cpus
from poprun.placement import Place, names_binding
from poprun.settings import Settings

CONTROL_VARIABLE = "POPRUN_CONTROL"
"""Names the socket at which shims report; forwarded by name, so the command does not depend on it."""

FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
SHIM = Path(__file__).with_name("shim.py")

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
        places: where each instance runs.
        mpirun: path of mpirun.
        python: path of the interpreter that runs the shims.
        extra: variables that poprun sets besides POPDIST_*.
        forwarded: variables of the user that are forwarded by name.
        oversubscribes: whether there are more instances than cores.
    """

    settings: Settings
    places: tuple[Place, ...]
    mpirun: str
    python: str
    extra: dict[str, str]
    forwarded: tuple[str, ...]
    oversubscribes: bool


def build_command(launch: Launch) -> list[str]:
    """The words of the mpirun command: general options, then one application context per instance."""
    words = [launch.mpirun, *_general_options(launch)]
    for place in launch.places:
        separator = [":"] if place.index else []
        words += [*separator, *_application_context(launch, place)]
    return words


def popdist_variables(settings: Settings, place: Place) -> dict[str, str]:
    """The variables that describe one instance to its program, in the original's order."""
    return {
        "POPDIST_NUM_TOTAL_REPLICAS": str(settings.num_replicas),
        "POPDIST_NUM_IPUS_PER_REPLICA": str(settings.ipus_per_replica),
        "POPDIST_NUM_LOCAL_REPLICAS": str(len(place.replicas)),
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_REPLICA_INDEX_OFFSET": str(place.replicas.start),
        "POPDIST_LOCAL_INSTANCE_INDEX": str(place.local_index),
    }


def extra_variables(settings: Settings, pool: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """What poprun sets besides POPDIST_*, unless the user has set it, in the environment or by `-x`.

    Args:
        settings: what the user asked for.
        pool: the setting of XLA's thread pool.
        environ: the user's environment.
    """
    # Output goes through a pipe; without this a Python program's lines would come only when 8 KiB are full.
    defaults = {**pool, "PYTHONUNBUFFERED": "1"}
    wanted = {name: value for name, value in defaults.items() if name not in environ}
    if settings.offline_mode:
        wanted["JAX_PLATFORMS"] = "cpu"
    exported = exported_names((*settings.mpi_global_args, *settings.mpi_local_args))
    return {name: value for name, value in wanted.items() if name not in exported}


def exported_names(arguments: Sequence[str]) -> set[str]:
    """The variables that `-x NAME` and `-x NAME=value` in options for mpirun set."""
    pairs = zip(arguments, arguments[1:], strict=False)
    return {value.partition("=")[0] for option, value in pairs if option == "-x"}


def _general_options(launch: Launch) -> list[str]:
    settings = launch.settings
    user = (*settings.mpi_global_args, *settings.mpi_local_args)
    words = ["--tag-output"]
    if not names_binding(user):
        words += ["--bind-to", "none", "--oversubscribe"]
    parameters = _QUIET_AND_INDEPENDENT | (_MANY_TO_A_CORE if launch.oversubscribes else {})
    for name, value in parameters.items():
        if name not in user:
            words += ["--mca", name, value]
    words += settings.mpi_global_args
    if settings.allow_run_as_root and "--allow-run-as-root" not in settings.mpi_global_args:
        words.append("--allow-run-as-root")
    return words


def _application_context(launch: Launch, place: Place) -> list[str]:
    variables = popdist_variables(launch.settings, place) | launch.extra
    words = ["-np", "1"]
    for name, value in variables.items():
        words += ["-x", f"{name}={value}"]
    for name in (*launch.forwarded, CONTROL_VARIABLE):
        words += ["-x", name]
    words += launch.settings.mpi_local_args
    shim = [launch.python, "-I", "-S", str(SHIM), format_cpus(place.cpus) or "any"]
    return [*words, *shim, *launch.settings.program]
