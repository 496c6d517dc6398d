"""The division of instances and spares over hosts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from poprun.cli.settings import LaunchSettings
from poprun.cli.wording import count, size_text
from poprun.errors import UsageError
from poprun.hosts.hosts import Host, check_hosts, shares_of


def share_hosts(hosts: Sequence[Host], settings: LaunchSettings) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide the instances over the hosts, then the spares: first to the hosts with the fewest processes.

    The last hosts may get spares only, so that the other hosts get equal shares of the instances.

    Returns:
        The number of instances on each host, and the number of spares on each host.

    Raises:
        UsageError: The instances cannot be divided over the hosts, or the slots are too few.
    """
    instances = _share_instances(hosts, settings)
    spares = _share_spares(hosts, instances, settings)
    if sum(spares) < settings.spares:
        room, slots = sum(spares), sum(host.slots or 0 for host in hosts)
        fewer = f"use {count(room, 'spare')} (--spares)" if room else "leave the spares out"
        raise UsageError(
            f"the hosts have {count(slots, 'slot')}, but {size_text(settings.num_instances, settings.spares)} are "
            f"asked for: {fewer}, give the hosts more slots, or let spares need none (--spares-oversubscribe yes)"
        )
    return instances, spares


def most_spares(hosts: Sequence[Host], settings: LaunchSettings) -> int:
    """Return the number of spares, up to the user's, for which hosts that take all instances have room."""
    return sum(_share_spares(hosts, _share_instances(hosts, settings), settings))


def add_hosts(chosen: Sequence[Host], available: Sequence[Host], settings: LaunchSettings) -> tuple[Host, ...]:
    """Return the hosts chosen for instances, and one more host for each spare while there are unused ones."""
    unused = [host for host in available if host not in chosen]
    return (*chosen, *unused[: settings.spares])


def _share_instances(hosts: Sequence[Host], settings: LaunchSettings) -> tuple[int, ...]:
    instances = settings.num_instances
    for number in range(len(hosts), max(0, len(hosts) - settings.spares - 1), -1):
        share, rest = divmod(instances, number)
        if share and not rest and all(host.slots is None or host.slots >= share for host in hosts[:number]):
            return (share,) * number + (0,) * (len(hosts) - number)
    check_hosts(hosts, settings)
    return shares_of(hosts, instances)


def _share_spares(hosts: Sequence[Host], instances: Sequence[int], settings: LaunchSettings) -> tuple[int, ...]:
    """Return the number of spares on each host; fewer than the user wants in all if the slots are too few.

    Of hosts with equally many processes, the last one comes first: the first one runs the chief.
    """
    spares = [0] * len(hosts)

    def has_room(index: int) -> bool:
        slots = hosts[index].slots
        return slots is None or settings.spares_oversubscribe or instances[index] + spares[index] < slots

    for _ in range(settings.spares):
        free = [index for index in range(len(hosts)) if has_room(index)]
        if not free:
            break
        spares[min(free, key=lambda index: (instances[index] + spares[index], -index))] += 1
    return tuple(spares)
