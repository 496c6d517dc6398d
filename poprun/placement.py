"""Where everything runs: replicas on instances, instances on hosts and cores. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poprun.cores import Core, divide_cores
from poprun.settings import Settings

BINDING_OPTIONS = ("--bind-to", "--map-by", "--cpu-set", "--cpu-list", "--rankfile")


@dataclass(frozen=True)
class Place:
    """Where one instance runs and what it drives.

    Attributes:
        index: of the instance, which is also its rank.
        host: its machine.
        local_index: among the instances of that machine.
        replicas: the global indices of its replicas.
        cpus: what it is pinned to; empty: not pinned.
    """

    index: int
    host: str
    local_index: int
    replicas: range
    cpus: tuple[int, ...] = ()


def place_instances(settings: Settings, host: str, cores: Sequence[Core]) -> tuple[Place, ...]:
    """Place the instances of a job on one host.

    Args:
        settings: how many instances and replicas, and whether to pin.
        host: the machine's name.
        cores: the cores that may be used, sorted.
    """
    blocks = divide_cores(cores, settings.num_instances) if pins_instances(settings) else None
    local = settings.replicas_per_instance
    return tuple(
        Place(index, host, index, range(index * local, (index + 1) * local), blocks[index] if blocks else ())
        for index in range(settings.num_instances)
    )


def pins_instances(settings: Settings) -> bool:
    """Whether instances get cores of their own: there are several, and the user wants nothing else."""
    return (
        settings.num_instances > 1
        and settings.process_placement != "disabled"
        and not names_binding((*settings.mpi_global_args, *settings.mpi_local_args))
    )


def names_binding(arguments: Sequence[str]) -> bool:
    """Whether options for mpirun say where processes run."""
    return any(argument.partition("=")[0] in BINDING_OPTIONS for argument in arguments)
