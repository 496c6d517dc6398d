"""What each rank of `against_all_reduce.py` does, with the version of `collectives` that Python finds first.

usage: against_all_reduce_rank.py SOCKET GROUP [RANK ADDRESS...]     (the latter over gRPC, with the addresses of all)

It imports nothing that another version may not have.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import control
from contributions import contribution, sum_checks, tree_sum

import collectives

Connections = dict[str, collectives.Communicator]


class Rank:
    """One rank.

    Args:
        connections: for each way that is measured.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.rank = next(iter(connections.values())).rank

    def prepare(self, over: str, nbytes: int, replicas: int) -> dict[str, bool]:
        """Make the arrays of a case; how right their first sum is."""
        self._communicator = self._connections[over]
        first, elements = self.rank * replicas, nbytes // 4
        self._arrays = [contribution(first + number, elements) for number in range(replicas)]
        self._out = self._communicator.allocate(self._arrays[0].shape, self._arrays[0].dtype)
        self._communicator.ordered_all_reduce(self._arrays, self._out)
        return sum_checks(self._out, tree_sum(self._communicator.size * replicas, elements))

    def reduce(self, repeats: int) -> float:
        """Seconds for one of so many all-reduces; one more before them lets all ranks begin together."""
        communicator, arrays, out = self._communicator, self._arrays, self._out
        communicator.ordered_all_reduce(arrays, out)
        began = time.perf_counter()
        for _ in range(repeats):
            communicator.ordered_all_reduce(arrays, out)
        return (time.perf_counter() - began) / repeats

    def close(self) -> None:
        """Leave the others."""
        for communicator in self._connections.values():
            communicator.close()


def over_mpi() -> Connections:
    """This rank of a job, connected in both ways."""
    return {name: collectives.connect("mpi", collectives.Settings(mechanism=name)) for name in ("window", "ring")}


def over_grpc(rank: int, addresses: Sequence[str]) -> Connections:
    """One of several workers."""
    return {"grpc": collectives.connect("grpc", collectives.Settings(), addresses=addresses, rank=rank)}


def main() -> None:
    path, group, *words = sys.argv[1:]
    rank = Rank(over_grpc(int(words[0]), words[1:]) if words else over_mpi())
    control.serve(path, group, rank.rank, {"prepare": rank.prepare, "reduce": rank.reduce})
    rank.close()


if __name__ == "__main__":
    main()
