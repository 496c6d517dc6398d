"""A worker of `all_reduce.py --backends grpc`: our all-reduce over gRPC.

usage: all_reduce_grpc_rank.py SOCKET RANK ADDRESS...     (of all ranks)
"""

from __future__ import annotations

import sys
import time
from typing import Any

import control
import numpy as np
from contributions import contribution, tree_sum
from resident_memory import peak_bytes, reset_peak, resident_bytes

import collectives


def main() -> None:
    path, rank, *addresses = sys.argv[1:]
    communicator = collectives.connect("grpc", collectives.Settings(), addresses=addresses, rank=int(rank))
    ring = Ring(communicator)
    handlers: dict[str, Any] = {"memory": ring.extra_memory, "prepare": ring.prepare, "turn": ring.timed}
    control.serve(path, "grpc", int(rank), handlers)
    communicator.close()


class Ring:
    """All-reduces of one array per rank."""

    def __init__(self, communicator: collectives.Communicator) -> None:
        self._communicator = communicator
        self._contributions: list[np.ndarray] = []
        self._out = np.empty(0, np.float32)

    def extra_memory(self, nbytes: int) -> int:
        """Bytes that the first all-reduce of this size takes at its peak, besides its arrays."""
        self._make_arrays(nbytes)
        self._communicator.barrier()
        before = resident_bytes()
        reset_peak()
        self._reduce()
        return max(0, peak_bytes() - before)

    def prepare(self, nbytes: int) -> bool:
        """From now on reduce `nbytes`; whether the sum has the bits of that in the order of the tree."""
        self._make_arrays(nbytes)
        self._reduce()
        expected = tree_sum(self._communicator.size, nbytes // 4)
        return np.array_equal(self._out.view(np.uint32), expected.view(np.uint32))

    def timed(self, repeats: int) -> float:
        """Seconds per all-reduce, of `repeats` one after another; one more before them lets all begin together."""
        self._reduce()
        began = time.perf_counter()
        for _ in range(repeats):
            self._reduce()
        return (time.perf_counter() - began) / repeats

    def _make_arrays(self, nbytes: int) -> None:
        self._contributions = [contribution(self._communicator.rank, nbytes // 4)]
        self._out = self._communicator.allocate((nbytes // 4,), np.dtype(np.float32))
        self._out.fill(0)  # else its pages would count as extra

    def _reduce(self) -> None:
        self._communicator.ordered_all_reduce(self._contributions, self._out)


if __name__ == "__main__":
    main()
