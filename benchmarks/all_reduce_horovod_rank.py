"""A worker of `all_reduce.py --backends horovod`, under mpirun: all-reduces over Horovod, or over MPI without it.

usage: all_reduce_horovod_rank.py SOCKET mpi|horovod|hvd
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import control
import numpy as np
from contributions import Contributions, Reduce, add, contribution, sum_checks, tree_sum

Ways = dict[str, Callable[[Contributions], Reduce]]


@dataclass(frozen=True)
class Connection:
    """With the other ranks.

    Attributes:
        rank: of this process.
        size: number of ranks.
        ways: to add up, of which each is made for the arrays of the local replicas.
        close: ends it.
    """

    rank: int
    size: int
    ways: Ways
    close: Callable[[], Any]


def main() -> None:
    path, kind = sys.argv[1:]
    connection = CONNECT[kind]()
    reductions = Reductions(connection)
    control.serve(path, kind, connection.rank, {"prepare": reductions.prepare, "turn": reductions.timed})
    connection.close()


class Reductions:
    """All-reduces of the arrays of this rank's replicas.

    Args:
        connection: with the other ranks.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reduce: dict[str, Reduce] = {}

    def prepare(self, way: str, nbytes: int, local_replicas: int) -> dict[str, bool]:
        """From now on reduce `nbytes` in that way; whether the sum is right."""
        self._reduce.pop(way, None)
        rank, size, elements = self._connection.rank, self._connection.size, nbytes // 4
        contributions = [contribution(rank * local_replicas + number, elements) for number in range(local_replicas)]
        self._reduce[way] = self._connection.ways[way](contributions)
        return sum_checks(self._reduce[way](), tree_sum(size * local_replicas, elements))

    def timed(self, way: str, repeats: int) -> float:
        """Seconds per all-reduce, of `repeats` one after another; one more before them lets all begin together."""
        reduce = self._reduce[way]
        reduce()
        began = time.perf_counter()
        for _ in range(repeats):
            reduce()
        return (time.perf_counter() - began) / repeats


def connect_over_mpi() -> Connection:
    """Ours over shared memory, and MPI's own all-reduce."""
    import reductions

    connections = reductions.connect(None)
    ways: Ways = {
        "window": lambda contributions: reductions.window_shared(connections, contributions),
        "mpi": lambda contributions: reductions.mpi(connections, contributions),
    }
    return Connection(connections.mpi.rank, connections.mpi.size, ways, lambda: reductions.disconnect(connections))


def connect_ours() -> Connection:
    """Ours over Horovod."""
    import timing  # noqa: F401 - it makes the project importable

    import collectives

    communicator = collectives.connect("horovod")

    def make(contributions: Contributions) -> Reduce:
        out = communicator.allocate(contributions[0].shape, contributions[0].dtype)
        return lambda: communicator.ordered_all_reduce(contributions, out)

    return Connection(communicator.rank, communicator.size, {"horovod": make}, communicator.close)


def connect_horovod() -> Connection:
    """Horovod alone: no MPI but its own, no settings but those in the environment."""
    import torch
    from horovod import torch as hvd

    torch.set_num_threads(1)
    hvd.init()

    def make(contributions: Contributions) -> Reduce:
        out = np.empty_like(contributions[0])
        tensor = torch.from_numpy(out)

        def reduce() -> np.ndarray:
            add(contributions, out)
            hvd.allreduce_(tensor, op=hvd.Sum, name=f"gradients of {out.nbytes} bytes")
            return out

        return reduce

    return Connection(hvd.rank(), hvd.size(), {"hvd": make, "hvd_tuned": make}, hvd.shutdown)


CONNECT = {"mpi": connect_over_mpi, "horovod": connect_ours, "hvd": connect_horovod}


if __name__ == "__main__":
    main()
