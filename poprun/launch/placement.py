"""Where everything runs: replicas on instances, instances on hosts, domains and cores. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poprun.cli.settings import Settings
from poprun.hosts.cores import Core, deal_cores, deal_sockets, divide_cores

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
        nodes: the NUMA nodes of these; empty: not pinned.
        domain: its IPU-Link domain.
        device: the id of its device in the partition; None: there is no partition.
    """

    index: int
    host: str
    local_index: int
    replicas: range
    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    domain: int = 0
    device: int | None = None


def place_instances(
    settings: Settings,
    hosts: Sequence[str],
    cores: Mapping[str, Sequence[Core]],
    devices: Sequence[int] = (),
    shares: Sequence[int] = (),
) -> tuple[Place, ...]:
    """Place the instances of a job: blocks on the hosts, in the order of the hosts.

    Neighbouring instances are thus on one host wherever possible, and a ring over all of them crosses the link of
    each host once in each direction.

    Args:
        settings: how many instances and replicas, and whether to pin; instances divide over hosts and domains.
        hosts: the names of the machines.
        cores: for each host the cores that may be used, sorted.
        devices: the device of each instance; empty: none.
        shares: how many instances each host gets; empty: equally many.
    """
    shares = shares or (settings.num_instances // len(hosts),) * len(hosts)
    located = [(host, local) for host, share in zip(hosts, shares, strict=True) for local in range(share)]
    pinned = [
        cores_of
        for host, share in zip(hosts, shares, strict=True)
        for cores_of in pin_instances(settings, share, cores[host])
    ]
    replicas = settings.replicas_per_instance
    return tuple(
        Place(
            index=index,
            host=located[index][0],
            local_index=located[index][1],
            replicas=range(index * replicas, (index + 1) * replicas),
            cpus=tuple(sorted(core.cpu for core in own)),
            nodes=tuple(sorted({core.node for core in own})),
            domain=index * settings.domains // settings.num_instances,
            device=devices[index] if devices else None,
        )
        for index, own in enumerate(pinned)
    )


def pin_instances(settings: Settings, count: int, cores: Sequence[Core]) -> tuple[tuple[Core, ...], ...]:
    """What each of `count` instances on one host is pinned to; empty where it may run anywhere.

    With `spreadnuma` several instances get cores of their own, and a single one is not pinned.
    """
    free: tuple[tuple[Core, ...], ...] = ((),) * count
    strategy = settings.process_placement
    if strategy == "disabled" or names_binding(settings.all_mpi_args):
        return free
    if strategy == "cores":
        return deal_cores(cores, count)
    if strategy == "sockets":
        return deal_sockets(cores, count)
    return divide_cores(cores, count) if count > 1 else free


def names_binding(arguments: Sequence[str]) -> bool:
    """Whether options for mpirun say where processes run."""
    return any(argument.partition("=")[0] in BINDING_OPTIONS for argument in arguments)
