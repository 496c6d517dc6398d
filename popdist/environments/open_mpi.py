"""Instances started by Open MPI's mpirun without poprun: one rank is one instance."""

from __future__ import annotations

from collections.abc import Mapping

from popdist.environments.environment import Environment, LaunchedProcess, quote, require_all
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
VARIABLES = (RANK, SIZE, LOCAL_RANK)


def is_set(environ: Mapping[str, str]) -> bool:
    """Return whether any of Open MPI's variables is set."""
    return any(name in environ for name in VARIABLES)


def read_process(environ: Mapping[str, str]) -> LaunchedProcess:
    """Read the process from Open MPI's variables.

    Raises:
        EnvironmentMismatchError: The variables are incomplete or not numbers, or a rank is not below the size.
    """
    require_all(environ, VARIABLES, "Open MPI")
    process = LaunchedProcess.read(environ, RANK, SIZE, LOCAL_RANK)
    if process.rank >= process.size or process.local_rank >= process.size:
        raise EnvironmentMismatchError(
            f"a rank is not below the size: {quote(environ, VARIABLES)}; start the program with mpirun or poprun"
        )
    return process


class OpenMPIEnvironment(Environment):
    """mpirun without poprun. The ranks share the replicas evenly; by default there is one per rank."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        return is_set(environ)

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        return read_process(environ).instance(num_replicas, quote(environ, [SIZE]), "mpirun")
