"""A rank of `all_reduce.py` and `against_all_reduce.py`, which adds up arrays in the requested ways.

usage: all_reduce_rank.py SOCKET GROUP mpi [FILE]            FILE: rendezvous of gloo's ranks
       all_reduce_rank.py SOCKET GROUP grpc RANK ADDRESS...  the addresses of all ranks
       all_reduce_rank.py SOCKET GROUP horovod|hvd

It imports only modules of the project that other versions have, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import control
import numpy as np
from contributions import Contributions, Reduce, add, contribution, sum_checks, tree_sum

Make = Callable[[Contributions], Reduce]
"""Makes a function that reduces the local replicas' arrays and does not change them."""


@dataclass(frozen=True)
class Connection:
    """A connection with the other ranks.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        ways: Ways to add up arrays, by name.
        close: Function that ends the connection.
    """

    rank: int
    size: int
    ways: dict[str, Make]
    close: Callable[[], Any]


class Reductions:
    """All-reduces of the arrays of this rank's replicas.

    Args:
        connection: Connection with the other ranks.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reduce: dict[str, Callable[[], Any]] = {}

    def ways(self) -> list[str]:
        """Return the names of all ways."""
        return list(self._connection.ways)

    def prepare(self, way: str, nbytes: int, replicas: int) -> dict[str, bool]:
        """Set the size of a way's arrays, and return whether its sum is right."""
        self._reduce.pop(way, None)
        elements, first = nbytes // 4, self._connection.rank * replicas
        contributions = [contribution(first + number, elements) for number in range(replicas)]
        reduce = self._reduce[way] = self._connection.ways[way](contributions)
        return sum_checks(reduce(), tree_sum(self._connection.size * replicas, elements))

    def prepare_stream(self, nbytes: int) -> bool:
        """Add a way "stream": a sum that reads two arrays and writes a third, all larger than the caches."""
        first, second, out = (np.full(nbytes // 4, value, np.float32) for value in (1, 2, 0))
        self._reduce["stream"] = lambda: np.add(first, second, out)
        return True

    def turn(self, way: str, repeats: int) -> float:
        """Return the seconds per all-reduce, of `repeats` in a row; one more before them synchronises the ranks."""
        reduce = self._reduce[way]
        reduce()
        began = time.perf_counter()
        for _ in range(repeats):
            reduce()
        return (time.perf_counter() - began) / repeats


def ours(communicator: Any, is_shared: bool = True) -> Make:
    """Return our reduction, with its result in memory from `allocate`, as in a step, or in an array of this rank."""

    def make(contributions: Contributions) -> Reduce:
        like = contributions[0]
        out = communicator.allocate(like.shape, like.dtype) if is_shared else np.empty_like(like)

        def reduce() -> np.ndarray:
            communicator.ordered_all_reduce(contributions, out)
            return out

        return reduce

    return make


def of_local_sum(all_reduce: Callable[[np.ndarray], Callable[[], Any]]) -> Make:
    """Return a reduction that adds the local replicas' arrays and then calls an all-reduce in place."""

    def make(contributions: Contributions) -> Reduce:
        out = np.empty_like(contributions[0])
        in_place = all_reduce(out)

        def reduce() -> np.ndarray:
            add(contributions, out)
            in_place()
            return out

        return reduce

    return make


def over_mpi(rendezvous: str = "") -> Connection:
    """Connect for our window and ring, MPI's own all-reduce, and gloo's if torch is installed."""
    from mpi4py import MPI

    import collectives

    comm = MPI.COMM_WORLD
    window, ring = (collectives.connect("mpi", collectives.Settings(mechanism=name)) for name in ("window", "ring"))
    torch = start_gloo(comm, rendezvous) if rendezvous else None

    def mpi(contributions: Contributions) -> Reduce:
        out = np.empty_like(contributions[0])

        def reduce() -> np.ndarray:
            is_one = len(contributions) == 1
            comm.Allreduce(contributions[0] if is_one else MPI.IN_PLACE, out if is_one else add(contributions, out))
            return out

        return reduce

    ways = {"window": ours(window), "window_private": ours(window, is_shared=False), "ring": ours(ring), "mpi": mpi}
    if torch is not None:
        ways["gloo"] = of_local_sum(lambda out: lambda: torch.distributed.all_reduce(torch.from_numpy(out)))

    def close() -> None:
        window.close()
        ring.close()
        if torch is not None:
            torch.distributed.destroy_process_group()

    return Connection(comm.rank, comm.size, ways, close)


def start_gloo(comm: Any, rendezvous: str) -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError:
        torch = None
    if not all(comm.allgather(torch is not None)):
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    meeting = {"init_method": f"file://{rendezvous}", "rank": comm.rank, "world_size": comm.size}
    torch.distributed.init_process_group("gloo", **meeting)
    return torch


def over_grpc(rank: str, *addresses: str) -> Connection:
    """Connect for our all-reduce between workers."""
    import collectives

    workers = collectives.connect("grpc", collectives.Settings(), addresses=addresses, rank=int(rank))
    return Connection(workers.rank, workers.size, {"grpc": ours(workers)}, workers.close)


def over_horovod() -> Connection:
    """Connect for our all-reduce over Horovod."""
    import timing  # noqa: F401 - timing makes the project importable

    import collectives

    communicator = collectives.connect("horovod")
    return Connection(communicator.rank, communicator.size, {"horovod": ours(communicator)}, communicator.close)


def of_horovod() -> Connection:
    """Connect for Horovod alone, with its own MPI and the settings of the environment only."""
    import torch
    from horovod import torch as hvd

    torch.set_num_threads(1)
    hvd.init()

    def all_reduce(out: np.ndarray) -> Callable[[], Any]:
        tensor = torch.from_numpy(out)
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"gradients of {out.nbytes} bytes")

    return Connection(hvd.rank(), hvd.size(), {"hvd": of_local_sum(all_reduce)}, hvd.shutdown)


CONNECT: dict[str, Callable[..., Connection]] = {
    "mpi": over_mpi,
    "grpc": over_grpc,
    "horovod": over_horovod,
    "hvd": of_horovod,
}


def main() -> None:
    path, group, kind, *words = sys.argv[1:]
    connection = CONNECT[kind](*words)
    reductions = Reductions(connection)
    handlers: dict[str, Callable[..., Any]] = {
        "ways": reductions.ways,
        "prepare": reductions.prepare,
        "prepare_stream": reductions.prepare_stream,
        "turn": reductions.turn,
    }
    control.serve(path, group, connection.rank, handlers)
    connection.close()


if __name__ == "__main__":
    main()
