"""The variables by which `torch.distributed` connects processes (init_method="env://"), as torchrun sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from poprun.hosts.hosts import Host
from poprun.launch.placement import Place

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
_LOOPBACK = "127.0.0.1"
_BELOW_EPHEMERAL = range(20_000, 32_768)  # ip_local_port_range of Linux begins behind it


def meeting_point(hosts: Sequence[Host], here: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return where instance 0 listens and the others call, unless the user's environment says it.

    The port is free where instance 0 runs on this machine. On another host it is drawn by chance, from those that the
    kernel gives to nobody.

    Args:
        hosts: of the job, that of instance 0 first.
        here: the address of this machine for the other hosts; empty without them, or if a dry run cannot know it.
        environ: the user's environment.
    """
    first = hosts[0]
    if len(hosts) == 1 and first.is_this_machine:
        address = _LOOPBACK
    else:
        address = here if first.is_this_machine and here else first.name
    port = _free_port() if first.is_this_machine else _any_port()
    return {ADDRESS: environ.get(ADDRESS) or address, PORT: environ.get(PORT) or str(port)}


def rank_variables(place: Place, places: Sequence[Place]) -> dict[str, str]:
    """Return what tells one instance its place among all of them, and among those of its host."""
    hosts = list(dict.fromkeys(other.host for other in places))
    node = str(hosts.index(place.host))
    return {
        "RANK": str(place.index),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": str(place.local_index),
        "LOCAL_WORLD_SIZE": str(sum(other.host == place.host for other in places)),
        "GROUP_RANK": node,
        "NODE_RANK": node,
    }


def _any_port() -> int:
    return _BELOW_EPHEMERAL[int.from_bytes(os.urandom(4)) % len(_BELOW_EPHEMERAL)]


def _free_port() -> int:
    import socket  # costs some milliseconds, needed only by those who ask for it

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
