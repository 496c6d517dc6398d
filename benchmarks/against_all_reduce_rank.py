"""What each rank of `against_all_reduce.py` does, with the version of `collectives` that Python finds first.

usage: against_all_reduce_rank.py SOCKET VERSION     (imports nothing that another version may not have)
"""

from __future__ import annotations

import sys
import time

import control
from contributions import contribution

import collectives


class Ranks:
    """One rank, connected in both ways."""

    def __init__(self) -> None:
        self._connections = {
            name: collectives.connect("mpi", collectives.Settings(mechanism=name)) for name in ("window", "ring")
        }
        self.rank = self._connections["window"].rank

    def prepare(self, mechanism: str, nbytes: int, replicas: int) -> bool:
        """Make the arrays of a case; returns when that is done, with True."""
        self._communicator = self._connections[mechanism]
        first = self.rank * replicas
        self._arrays = [contribution(first + number, nbytes // 4) for number in range(replicas)]
        self._out = self._communicator.allocate(self._arrays[0].shape, self._arrays[0].dtype)
        return True

    def reduce(self, repeats: int) -> float:
        """Seconds for one of so many all-reduces."""
        communicator, arrays, out = self._communicator, self._arrays, self._out
        for _ in range(3):
            communicator.ordered_all_reduce(arrays, out)
        began = time.perf_counter()
        for _ in range(repeats):
            communicator.ordered_all_reduce(arrays, out)
        return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    ranks = Ranks()
    control.serve(sys.argv[1], sys.argv[2], ranks.rank, {"prepare": ranks.prepare, "reduce": ranks.reduce})
