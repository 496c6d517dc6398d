"""The hosts of a job when nobody names them: what the batch system around poprun has reserved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from poprun.errors import UsageError
from poprun.hosts import Host
from poprun.schedulers.kubernetes import KubernetesScheduler
from poprun.schedulers.lsf import LsfScheduler
from poprun.schedulers.open_mpi_hostfile import OpenMPIHostfile
from poprun.schedulers.pbs import PbsScheduler
from poprun.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler, describe_slots
from poprun.schedulers.slurm import SlurmScheduler
from poprun.wording import count

BATCH_SYSTEMS: tuple[Scheduler, ...] = (SlurmScheduler(), PbsScheduler(), LsfScheduler())
"""Those that reserve hosts for a job: where several seem to, they have to agree."""

HOSTFILES: tuple[Scheduler, ...] = (KubernetesScheduler(), OpenMPIHostfile())
"""Those that are asked where there is no batch system, as by mpirun; the first active one counts."""


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def find_allocation(environ: Mapping[str, str], read_text: ReadText = _read_text) -> Allocation | None:
    """The hosts that were reserved for this process; None: nobody reserved any.

    Args:
        environ: the variables of the process.
        read_text: returns the contents of a file that the variables name.

    Raises:
        UsageError: what is reserved cannot be read, or two batch systems contradict each other.
    """
    reserved = [system.allocation(environ, read_text) for system in BATCH_SYSTEMS if system.is_active(environ)]
    for other in reserved[1:]:
        if other.hosts != reserved[0].hosts:
            raise UsageError(
                f"{reserved[0].source} has {describe_slots(reserved[0].hosts)}, but {other.source} has "
                f"{describe_slots(other.hosts)}; {NAME_HOSTS}, or unset the variables of one"
            )
    if reserved:
        return reserved[0]
    hostfile = next((file for file in HOSTFILES if file.is_active(environ)), None)
    return hostfile.allocation(environ, read_text) if hostfile is not None else None


def choose_hosts(allocation: Allocation, num_instances: int) -> Allocation:
    """The part of an allocation over which the instances are spread: as many hosts as take equally many each.

    Raises:
        UsageError: there are more instances than slots, or they cannot be spread evenly.
    """
    slots = allocation.slots
    if slots is not None and num_instances > slots:
        raise UsageError(
            f"{count(num_instances, 'instance')} on the {count(slots, 'slot')} of {allocation.source} "
            f"({describe_slots(allocation.hosts)}): use at most {slots} (--num-instances), {_ways_out(allocation)}"
        )
    chosen = spread(allocation.hosts, num_instances)
    if not chosen:
        fits = max(n for n in range(1, num_instances) if spread(allocation.hosts, n))
        raise UsageError(
            f"{count(num_instances, 'instance')} cannot be spread evenly over the slots of {allocation.source} "
            f"({describe_slots(allocation.hosts)}): use {fits} (--num-instances), {_ways_out(allocation)}"
        )
    return replace(allocation, hosts=chosen)


def spread(hosts: Sequence[Host], num_instances: int) -> tuple[Host, ...]:
    """The most hosts, the first of them, that take equally many instances each; nothing if there are none."""
    for number in range(min(len(hosts), num_instances), 0, -1):
        if num_instances % number == 0:
            share = num_instances // number
            large_enough = [host for host in hosts if host.slots is None or host.slots >= share]
            if len(large_enough) >= number:
                return tuple(large_enough[:number])
    return ()


def _ways_out(allocation: Allocation) -> str:
    return f"{allocation.way_to_more}, or {NAME_HOSTS}, which counts no slots"
