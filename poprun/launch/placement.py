"""The placement of replicas on instances, and of instances on hosts, domains and cores. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from poprun.cli.settings import PARTITION_VARIABLE, LaunchSettings
from poprun.cli.wording import count
from poprun.errors import UsageError
from poprun.hosts.this_machine import Core


@dataclass(frozen=True)
class InstancePlace:
    """The place of an instance, and the replicas that it drives.

    Attributes:
        index: Index of the instance, which is also its rank.
        host: Name of its machine.
        local_index: Index among the instances of that machine.
        replicas: Global indices of its replicas.
        cpus: The CPUs that it is pinned to. Empty: not pinned.
        nodes: The NUMA nodes of these CPUs. Empty: not pinned.
        domain: Its IPU-Link domain.
        device: The id of its device in the partition. None: no partition.
        is_spare: Whether it begins as a spare. `replicas`, `domain` and `device` are then those of the last instance.
        is_reserve: Whether it is a spare whose program begins only when poprun needs a new instance.
    """

    index: int
    host: str
    local_index: int
    replicas: range
    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    domain: int = 0
    device: int | None = None
    is_spare: bool = False
    is_reserve: bool = False


def place_instances(
    settings: LaunchSettings,
    hosts: Sequence[str],
    cores: Mapping[str, Sequence[Core]],
    devices: Sequence[int] = (),
    shares: Sequence[int] = (),
    spares: Sequence[int] = (),
) -> tuple[InstancePlace, ...]:
    """Place the instances of a job in blocks on the hosts, in the order of the hosts; then the spares likewise.

    Neighbouring instances thus share a host if possible, and a ring over all instances crosses each host's link once
    in each direction.

    Args:
        settings: The numbers of instances and replicas, and the pinning. Instances divide over hosts and domains.
        hosts: The names of the machines.
        cores: The usable cores of each host, sorted.
        devices: The device of each instance. Empty: no devices.
        shares: The number of instances on each host. Empty: equal shares.
        spares: The number of spares on each host. Empty: none.
    """
    shares = shares or (settings.num_instances // len(hosts),) * len(hosts)
    spares = spares or (0,) * len(hosts)
    located, pinned, rest = [], list[tuple[Core, ...]](), list[tuple[str, int, tuple[Core, ...]]]()
    for host, share, more in zip(hosts, shares, spares, strict=True):
        own = 0 if settings.spares_oversubscribe else more
        blocks = pin_instances(settings, share + own, cores[host]) + ((),) * (more - own)
        located += [(host, local) for local in range(share)]
        pinned += blocks[:share]
        rest += [(host, share + number, block) for number, block in enumerate(blocks[share:])]
    replicas, domains = settings.replicas_per_instance, settings.domains
    places = tuple(
        InstancePlace(
            index=index,
            host=located[index][0],
            local_index=located[index][1],
            replicas=range(index * replicas, (index + 1) * replicas),
            cpus=_cpus_of(own),
            nodes=_nodes_of(own),
            domain=index * domains // settings.num_instances,
            device=devices[index] if devices else None,
        )
        for index, own in enumerate(pinned)
    )
    places += tuple(
        replace(
            places[-1],
            index=len(places) + number,
            host=host,
            local_index=local,
            cpus=_cpus_of(block),
            nodes=_nodes_of(block),
            is_spare=True,
        )
        for number, (host, local, block) in enumerate(rest)
    )
    return places + _reserves(settings, places)


def device_ids(settings: LaunchSettings) -> tuple[int, ...]:
    """Return the device of each instance in the simulated V-IPU partition; empty if the job does not use it.

    The semantics are those of Graphcore's V-IPU and `gc-info`. A partition has as many IPUs as the job needs. A
    partition of P IPUs has P devices of one IPU with the ids 0 to P - 1, then P / 2 devices of two IPUs, and so on up
    to one device of all IPUs. An instance takes one device that spans all its replicas; neighbours take neighbouring
    devices.

    Example: 4 instances on 16 IPUs get the devices 24 to 27, after 16 devices of one IPU and 8 of two.

    Raises:
        UsageError: The job does not need a power of two of IPUs, or a device map is given.
    """
    if not settings.uses_partition:
        return ()
    if str(settings.vipu_partition).endswith(".toml"):
        raise UsageError(f"--vipu-partition {settings.vipu_partition}: there are no device maps any more; give a name")
    ipus, instances = settings.num_ipus, settings.num_instances
    below = 1 << (ipus.bit_length() - 1)
    if ipus != below:
        raise UsageError(
            f"the job needs {count(ipus, 'IPU')} ({count(settings.num_replicas, 'replica')} x "
            f"{settings.ipus_per_replica}), but the size of a partition must be a power of two: "
            f"use {below} or {2 * below} (--num-replicas, --ipus-per-replica), or name no partition "
            f"(--vipu-partition, {PARTITION_VARIABLE})"
        )
    first = 2 * ipus - 2 * instances
    return tuple(range(first, first + instances))


def _reserves(settings: LaunchSettings, places: Sequence[InstancePlace]) -> tuple[InstancePlace, ...]:
    """Return the places of the reserves. They are not pinned: a new instance finds the cores of the lost one idle."""
    on_host = Counter(place.host for place in places)
    located = [
        (host, taken + number) for host, taken in on_host.items() for number in range(settings.reserves_per_host)
    ]
    return tuple(
        replace(
            places[-1],
            index=len(places) + number,
            host=host,
            local_index=local,
            cpus=(),
            nodes=(),
            is_spare=True,
            is_reserve=True,
        )
        for number, (host, local) in enumerate(located)
    )


def _cpus_of(block: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(core.cpu for core in block))


def _nodes_of(block: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted({core.node for core in block}))


def pin_instances(settings: LaunchSettings, count: int, cores: Sequence[Core]) -> tuple[tuple[Core, ...], ...]:
    """Return the cores of each of `count` instances on one host; empty if an instance may run anywhere.

    With `spreadnuma`, several instances get cores of their own, and a single instance is not pinned.
    """
    free: tuple[tuple[Core, ...], ...] = ((),) * count
    strategy = settings.process_placement
    if strategy == "disabled" or settings.mpi.names_binding:
        return free
    if strategy == "cores":
        return deal_cores(cores, count)
    if strategy == "sockets":
        return deal_sockets(cores, count)
    return divide_cores(cores, count) if count > 1 else free


def divide_cores(cores: Sequence[Core], count: int) -> tuple[tuple[Core, ...], ...]:
    """Divide the cores into `count` disjoint blocks of equal size, or nearly so, in order.

    Physical cores stay whole if there are enough of them. The cores are sorted by NUMA node, so the blocks share the
    nodes evenly if the numbers of nodes and blocks allow it.

    Returns:
        The blocks; empty blocks (run anywhere) if there are fewer cores than blocks.
    """
    units = _units(cores, count)
    if not units:
        return ((),) * count
    edges = [index * len(units) // count for index in range(count + 1)]
    blocks = (units[low:high] for low, high in zip(edges, edges[1:], strict=False))
    return tuple(tuple(core for unit in block for core in unit) for block in blocks)


def deal_cores(cores: Sequence[Core], count: int) -> tuple[tuple[Core, ...], ...]:
    """Give one core to each of `count` instances in turn, as `mpirun --bind-to core` does.

    Returns:
        One core with its threads for each instance; one thread if the cores are too few; empty blocks (run anywhere)
        if the threads are too few.
    """
    return tuple(_units(cores, count)[:count]) or ((),) * count


def deal_sockets(cores: Sequence[Core], count: int) -> tuple[tuple[Core, ...], ...]:
    """Give all cores of one processor to each of `count` instances in turn, as `mpirun --map-by socket` does."""
    sockets: dict[int, list[Core]] = {}
    for core in cores:
        sockets.setdefault(core.package, []).append(core)
    blocks = [tuple(block) for _, block in sorted(sockets.items())]
    return tuple(blocks[index % len(blocks)] for index in range(count))


def _units(cores: Sequence[Core], count: int) -> list[tuple[Core, ...]]:
    """Return the pieces to divide among `count` instances: cores, else threads; an empty list if both are too few."""
    whole: dict[tuple[int, int, int], list[Core]] = {}
    for core in cores:
        whole.setdefault((core.node, core.package, core.core), []).append(core)
    units: list[tuple[Core, ...]] = [tuple(threads) for threads in whole.values()]
    if len(units) < count:
        units = [(core,) for core in cores]
    return units if len(units) >= count else []
