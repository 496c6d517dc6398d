"""Instances started by Open MPI's own mpirun: one rank is one instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist.environments.environment import (
    Environment,
    quote,
    read_whole_number,
    replicas_of_each,
    require_all,
)
from popdist.errors import EnvironmentMismatchError
from popdist.instance import Instance

RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
VARIABLES = (RANK, SIZE, LOCAL_RANK)


@dataclass(frozen=True)
class MpiProcess:
    """What Open MPI tells a process about itself."""

    rank: int
    size: int
    local_rank: int


def is_set(environ: Mapping[str, str]) -> bool:
    """Whether any of Open MPI's variables is set."""
    return any(name in environ for name in VARIABLES)


def read_process(environ: Mapping[str, str]) -> MpiProcess:
    """The process that Open MPI's variables describe.

    Raises:
        EnvironmentMismatchError: they are incomplete or not numbers, or the rank is not below the size.
    """
    require_all(environ, VARIABLES, "Open MPI")
    process = MpiProcess(
        rank=read_whole_number(environ, RANK, 0),
        size=read_whole_number(environ, SIZE, 1),
        local_rank=read_whole_number(environ, LOCAL_RANK, 0),
    )
    if process.rank >= process.size or process.local_rank >= process.size:
        raise EnvironmentMismatchError(
            f"a rank is not below the size: {quote(environ, VARIABLES)}; start the program with mpirun or poprun"
        )
    return process


class OpenMPIEnvironment(Environment):
    """Bare mpirun. The replicas are divided evenly among the ranks; one per rank unless the program asks."""

    def is_active(self, environ: Mapping[str, str]) -> bool:
        """Whether any of Open MPI's variables is set."""
        return is_set(environ)

    def describe(self, environ: Mapping[str, str], num_replicas: int | None) -> Instance:
        """The instance of this rank, with its even share of the replicas."""
        process = read_process(environ)
        local = replicas_of_each(num_replicas, process.size, quote(environ, [SIZE]))
        return Instance(
            index=process.rank,
            count=process.size,
            local_replicas=local,
            replica_offset=process.rank * local,
            total_replicas=process.size * local,
            local_index=process.local_rank,
            launcher="mpirun",
        )
