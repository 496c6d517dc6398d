"""An instance of `hosts.py`, which adds up arrays with the others in the requested ways.

usage: hosts_rank.py SOCKET GROUP
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from contributions import contribution, sum_checks, tree_sum
from control import serve

import collectives
from collectives.backends.mpi import MPI

COUNTERS = Path("/sys/class/net/eth0/statistics")


class Instance:
    """A rank with two ways to reduce: "ordered" (ours) and "mpi"."""

    def __init__(self) -> None:
        self._mpi = MPI.COMM_WORLD
        # Each simulated host counts all cores as its own, so a waiting rank must give its core to others at once.
        self._ours = collectives.connect("mpi", collectives.Settings(spins=0))
        self._ways: dict[str, Callable[[], np.ndarray]] = {}

    @property
    def rank(self) -> int:
        """The rank of this instance."""
        return self._mpi.rank

    def prepare(self, nbytes: int, ways: Sequence[str]) -> dict[str, dict[str, bool]]:
        """Make arrays of `nbytes`, and return for each way whether its first result is right."""
        elements = nbytes // 4
        mine, out = contribution(self.rank, elements), np.empty(elements, np.float32)

        def ordered() -> np.ndarray:
            return self._ours.ordered_all_reduce([mine], out)

        def mpi() -> np.ndarray:
            self._mpi.Allreduce(mine, out)
            return out

        self._ways = {"ordered": ordered, "mpi": mpi}
        expected = tree_sum(self._mpi.size, elements)
        return {way: sum_checks(self._ways[way](), expected) for way in ways}

    def turn(self, way: str, repeats: int) -> dict[str, float]:
        """Return for one of `repeats` reductions its seconds and the bytes of this host's link, in each direction."""
        reduce = self._ways[way]
        self._mpi.Barrier()
        before = link_bytes()
        self._mpi.Barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            reduce()
        seconds = time.perf_counter() - began
        self._mpi.Barrier()
        sent, received = (now - then for now, then in zip(link_bytes(), before, strict=True))
        return {"seconds": seconds / repeats, "sent": sent / repeats, "received": received / repeats}

    def idle(self, seconds: float) -> dict[str, float]:
        """Return the idle traffic of this host's link, in bytes per second and direction."""
        before = link_bytes()
        time.sleep(seconds)
        sent, received = (now - then for now, then in zip(link_bytes(), before, strict=True))
        return {"sent": sent / seconds, "received": received / seconds}

    def close(self) -> None:
        """Close the connection with the others."""
        self._ours.close()


def link_bytes() -> tuple[int, int]:
    """Return the bytes that this host has sent and received so far."""
    sent, received = (int((COUNTERS / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def main() -> None:
    path, group = sys.argv[1:]
    instance = Instance()
    serve(path, group, instance.rank, {"prepare": instance.prepare, "turn": instance.turn, "idle": instance.idle})
    instance.close()


if __name__ == "__main__":
    main()
