"""The "popdist" backend of torch.distributed: process groups whose sums have the order of our tree.

This module registers the name "popdist", and the address popdist:// at which the instances of a job meet.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from collectives import forks
from popdist.errors import LifeCycleError
from strategies.core.agreement import broadcast_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions
    from torch.distributed.distributed_c10d import Store

    from collectives import Communicator
    from strategies.torch.process_group.group import PopDistProcessGroup

NAME = "popdist"
_LOOPBACK = "127.0.0.1"
_groups: weakref.WeakSet[PopDistProcessGroup] = weakref.WeakSet()  # all groups of this process


def register() -> None:
    """Let `torch.distributed.init_process_group` know the backend and the address; repeated calls do nothing."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        from torch.distributed.rendezvous import register_rendezvous_handler

        dist.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
        register_rendezvous_handler(NAME, meet)


def make_group(options: _DistributedBackendOptions, _: object) -> PopDistProcessGroup:
    """Make the process group of all instances, or of some; torch.distributed calls this on the members.

    Args:
        options: Ranks, timeout and name of the group. The timeout limits waits for other ranks, if it is not torch's
            default of 30 minutes. Otherwise POPDIST_TIMEOUT_S does, 600 by default.

    Raises:
        LifeCycleError: The ranks are not the instances of this job.
    """
    from popdist.context import join_besides
    from strategies.torch.process_group.group import PopDistProcessGroup

    everybody, members = _everybody(), list(options.global_ranks_in_group)
    if members:
        communicator = everybody.subgroup(members)
    else:
        _check_ranks(everybody, options.group_rank, options.group_size)
        communicator = join_besides(lambda settings, instance: everybody.subgroup(range(options.group_size)))
    if options.timeout != dist.constants.default_pg_timeout:
        communicator.limit_waits(options.timeout.total_seconds())
    if not _groups:
        forks.not_at_exit(_drain_all)  # handlers run in reverse order, and this one has to run before popdist's
        forks.at_exit(_drain_all)
    group = PopDistProcessGroup(communicator, f"{NAME} {options.group_id}")
    _groups.add(group)
    return group


def meet(url: str, timeout: timedelta | None = None, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Yield the store of all instances, this instance's rank and their number: the handler of popdist://.

    Instance 0 serves the store. MASTER_ADDR names its address for the other hosts; default: the name of its host.

    Args:
        url: The address. torch adds the arguments `rank` and `world_size` of the program, or -1, to its query.
        timeout: The limit of waits for the store.

    Raises:
        LifeCycleError: The program has given another rank or number of ranks than the launcher.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]  # it is imported under a condition

    timeout = timeout or dist.constants.default_pg_timeout
    everybody = _everybody()
    rank, size = everybody.rank, everybody.size
    given = {name: int(value) for name, value in parse_qsl(urlsplit(url).query) if value != "-1"}
    _check_ranks(everybody, given.get("rank", rank), given.get("world_size", size))
    store = TCPStore(_LOOPBACK, 0, size, True, timeout, wait_for_workers=False) if rank == 0 else None
    text = f"{_address(everybody)} {store.port}" if store is not None else ""
    host, port = broadcast_text(everybody, text, 0, "popdist://").split()
    if store is None:
        store = TCPStore(host, int(port), size, False, timeout, wait_for_workers=False)
    forks.never_free_in_children(store)
    yield store, rank, size
    raise RuntimeError("popdist:// cannot meet the instances of a job again; start the job again")


def _everybody() -> Communicator:
    import popdist

    popdist.init()
    return popdist.communicator()


def _check_ranks(everybody: Communicator, rank: int, size: int) -> None:
    if (everybody.rank, everybody.size) != (rank, size):
        raise LifeCycleError(
            f"torch.distributed says rank {rank} of {size}, the launcher says instance {everybody.rank} of "
            f"{everybody.size}; start the program with poprun or mpirun, and give "
            f"init_process_group('{NAME}', init_method='{NAME}://') without rank and world_size"
        )


def _address(everybody: Communicator) -> str:
    import popdist
    from popdist.membership.process import process

    if named := os.environ.get("MASTER_ADDR"):
        return named
    if process.instance is not None and process.instance.launcher == "tf_config":
        from popdist.environments.tf_config import read_cluster

        first = (process.cluster or read_cluster(os.environ)).addresses[0]
        return _LOOPBACK if first.startswith("unix:") else first.rpartition(":")[0].strip("[]")
    return _LOOPBACK if len(set(everybody.hosts)) == 1 else popdist.instance().host


def _drain_all() -> None:
    """Let pending works end before this instance closes its connections, unless the program has failed."""
    from popdist.membership.leaving import has_failed

    if not has_failed():
        for group in list(_groups):
            group.drain()
