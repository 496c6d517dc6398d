"""The hosts of a job that the batch system around poprun has reserved, used if the user names none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from poprun.cli.settings import LaunchSettings
from poprun.cli.wording import count, size_text
from poprun.errors import UsageError
from poprun.hosts.hosts import Host, most_instances, shares_of
from poprun.hosts.schedulers.flux import FluxScheduler
from poprun.hosts.schedulers.grid_engine import GridEngineScheduler
from poprun.hosts.schedulers.hostfiles import KubernetesScheduler, OpenMPIHostfile
from poprun.hosts.schedulers.lsf import LsfScheduler
from poprun.hosts.schedulers.pbs import PbsScheduler
from poprun.hosts.schedulers.scheduler import NAME_HOSTS, Allocation, ReadText, Scheduler, describe_slots
from poprun.hosts.schedulers.skypilot import SkyPilotScheduler
from poprun.hosts.schedulers.slurm import SlurmScheduler

BATCH_SYSTEMS: tuple[Scheduler, ...] = (
    SlurmScheduler(),
    PbsScheduler(),
    LsfScheduler(),
    GridEngineScheduler(),
    FluxScheduler(),
)
"""Schedulers that reserve hosts for a job. If several seem to have done so, their hosts have to agree."""

HOSTFILES: tuple[Scheduler, ...] = (KubernetesScheduler(), SkyPilotScheduler(), OpenMPIHostfile())
"""Lists of hosts that are read outside of a batch system, as mpirun does; the first one found counts."""


def _read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def find_allocation(environ: Mapping[str, str], read_text: ReadText = _read_text) -> Allocation | None:
    """Return the hosts that were reserved for this process, or None if none were.

    Args:
        environ: Environment variables of the process.
        read_text: Function that returns the contents of a file named by a variable.

    Raises:
        UsageError: The reserved hosts cannot be read, or two batch systems contradict each other.
    """
    reserved = list(_allocations(BATCH_SYSTEMS, environ, read_text))
    for other in reserved[1:]:
        if other.hosts != reserved[0].hosts:
            raise UsageError(
                f"{reserved[0].source} has {describe_slots(reserved[0].hosts)}, but {other.source} has "
                f"{describe_slots(other.hosts)}; {NAME_HOSTS}, or unset the variables of one"
            )
    return next(chain(reserved, _allocations(HOSTFILES, environ, read_text)), None)


def _allocations(
    schedulers: Iterable[Scheduler], environ: Mapping[str, str], read_text: ReadText
) -> Iterator[Allocation]:
    asked = [each for each in schedulers if not environ.keys().isdisjoint(each.variables)]
    return (found for each in asked if (found := each.allocation(environ, read_text)) is not None)


def choose_hosts(allocation: Allocation, num_instances: int, num_replicas: int = 0) -> Allocation:
    """Return the hosts for the instances: the largest number that takes equal shares, or all hosts.

    Args:
        allocation: The reserved hosts.
        num_instances: Number of instances to place.
        num_replicas: Number of replicas of the job; an advised number of instances divides it.

    Raises:
        UsageError: The hosts have fewer slots than there are instances.
    """
    slots = allocation.slots
    if slots is not None and num_instances > slots:
        fits = most_instances(num_replicas, slots)
        raise UsageError(
            f"{count(num_instances, 'instance')} do not fit on the {count(slots, 'slot')} of {allocation.source} "
            f"({describe_slots(allocation.hosts)}): use {fits} (--num-instances), "
            f"{allocation.way_to_more}, or {NAME_HOSTS}, which counts no slots"
        )
    return replace(allocation, hosts=spread(allocation.hosts, num_instances))


def describe_use(
    allocation: Allocation, hosts: Sequence[Host], settings: LaunchSettings, processes: Sequence[int]
) -> str:
    """Describe the used part of an allocation and how to use more of it; empty if all slots are used.

    Args:
        allocation: The reserved hosts.
        hosts: The hosts of the job.
        settings: The settings of the job.
        processes: The number of instances and spares on each of these hosts.
    """
    slots, instances = allocation.slots, settings.num_instances
    if slots is None or sum(processes) >= slots:
        return ""
    shares = dict(zip((host.name for host in hosts), processes, strict=True))
    used = ", ".join(f"{host.name}: {shares.get(host.name, 0)} of {host.slots}" for host in allocation.hosts)
    said = f"{size_text(instances, settings.spares)} on the {count(slots, 'slot')} of {allocation.source} ({used})"
    if len(hosts) < len(allocation.hosts):
        said += f": equal shares come before more hosts, and {instances} divide equally over {len(hosts)} at most"
    more = most_instances(settings.num_replicas, slots)
    return f"{said}; {more} is the most for {count(settings.num_replicas, 'replica')} (--num-instances)"


def spread(hosts: Sequence[Host], num_instances: int) -> tuple[Host, ...]:
    """Return the most hosts, in order, that take equal shares; else all hosts if their slots suffice; else none."""
    for number in range(min(len(hosts), num_instances), 0, -1):
        if num_instances % number == 0:
            share = num_instances // number
            large_enough = [host for host in hosts if host.slots is None or host.slots >= share]
            if len(large_enough) >= number:
                return tuple(large_enough[:number])
    return tuple(hosts) if hosts and shares_of(hosts, num_instances) else ()
