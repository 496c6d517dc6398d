"""The ways to add up the gradients of all replicas that `all_reduce.py` compares.

Each is made for the arrays of the local replicas, which it leaves as they are; called, it returns the sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from contributions import Contributions, Reduce, add
from mpi4py import MPI

import collectives


@dataclass(frozen=True)
class Connections:
    """This rank's connections to the others.

    Attributes:
        mpi: all ranks.
        window: ours over shared memory.
        ring: ours over messages.
        torch: the module, its process group initialised; None where it is not installed or not wanted.
    """

    mpi: MPI.Intracomm
    window: collectives.Communicator
    ring: collectives.Communicator
    torch: Any


def connect(rendezvous: Path | None) -> Connections:
    """Connect all ranks in all ways; a collective call.

    Args:
        rendezvous: a file that does not exist yet, through which the ranks of gloo find each other; None: without.
    """
    comm = MPI.COMM_WORLD
    window, ring = (collectives.connect("mpi", collectives.Settings(mechanism=name)) for name in ("window", "ring"))
    return Connections(comm, window, ring, _start_gloo(comm, rendezvous) if rendezvous else None)


def disconnect(connections: Connections) -> None:
    connections.window.close()
    connections.ring.close()
    if connections.torch is not None:
        connections.torch.distributed.destroy_process_group()


def _start_gloo(comm: MPI.Intracomm, rendezvous: Path) -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError:
        torch = None
    if not all(comm.allgather(torch is not None)):
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=comm.rank, world_size=comm.size
    )
    return torch


# ---- the ways


def window_shared(connections: Connections, contributions: Contributions) -> Reduce:
    """Ours as a training step uses it: the result lies in memory from `allocate`."""
    out = connections.window.allocate(contributions[0].shape, contributions[0].dtype)
    return lambda: connections.window.ordered_all_reduce(contributions, out)


def window_private(connections: Connections, contributions: Contributions) -> Reduce:
    """Ours over shared memory; every rank gets the result in an array of its own."""
    out = np.empty_like(contributions[0])
    return lambda: connections.window.ordered_all_reduce(contributions, out)


def ring(connections: Connections, contributions: Contributions) -> Reduce:
    """Ours over messages."""
    out = connections.ring.allocate(contributions[0].shape, contributions[0].dtype)
    return lambda: connections.ring.ordered_all_reduce(contributions, out)


def mpi(connections: Connections, contributions: Contributions) -> Reduce:
    """The local replicas' sum, then MPI_Allreduce."""
    out = np.empty_like(contributions[0])
    if len(contributions) == 1:
        return lambda: _mpi_all_reduce(connections.mpi, contributions[0], out)
    return lambda: _mpi_all_reduce(connections.mpi, MPI.IN_PLACE, add(contributions, out))


def gloo(connections: Connections, contributions: Contributions) -> Reduce:
    """The local replicas' sum, then the all-reduce of torch over gloo, which works in place."""
    out = np.empty_like(contributions[0])
    tensor = connections.torch.from_numpy(out)
    all_reduce = connections.torch.distributed.all_reduce

    def reduce() -> np.ndarray:
        add(contributions, out)
        all_reduce(tensor)
        return out

    return reduce


WAYS: dict[str, Callable[[Connections, Contributions], Reduce]] = {
    "window": window_shared,
    "window_private": window_private,
    "ring": ring,
    "mpi": mpi,
    "gloo": gloo,
}


def available_ways(connections: Connections) -> list[str]:
    return [name for name in WAYS if name != "gloo" or connections.torch is not None]


def _mpi_all_reduce(comm: MPI.Intracomm, source: Any, out: np.ndarray) -> np.ndarray:
    comm.Allreduce(source, out)
    return out
