"""A worker of `all_reduce.py --backends grpc`: our all-reduce over gRPC.

usage: all_reduce_grpc_rank.py SOCKET RANK ADDRESS...     (of all ranks)
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import control
import numpy as np
from contributions import contribution, sequential_sum

import collectives

KIB = 1 << 10
RESET_HIGH_WATER_MARK = "5"  # see proc_pid_clear_refs(5)


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
        """From now on reduce `nbytes`; whether the sum has the bits of the sequential one."""
        self._make_arrays(nbytes)
        self._reduce()
        expected = sequential_sum(self._communicator.size, nbytes // 4)
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


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Let the peak begin anew; where that is not allowed it counts from the start of the process."""
    try:
        Path("/proc/self/clear_refs").write_text(RESET_HIGH_WATER_MARK)
    except OSError:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        if largest > resident_bytes():
            print("the peak of the memory cannot be reset here: what is printed may be too small", file=sys.stderr)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
