"""One instance of a job that reduces arrays: `link_bytes_job.py ELEMENTS`.

Prints the kernel's counts of bytes sent and received over the link of its host and of segments resent by TCP, the
mechanism, and whether the sum is right. Counters are read between two MPI barriers, whose messages are counted, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import collectives

COUNTERS = Path("/sys/class/net/eth0/statistics")


def carried() -> list[int]:
    MPI.COMM_WORLD.Barrier()
    found = [int((COUNTERS / name).read_text()) for name in ("tx_bytes", "rx_bytes")] + [segments_sent_again()]
    MPI.COMM_WORLD.Barrier()
    return found


def segments_sent_again() -> int:
    """Return the number of segments resent on all connections of this host, see proc(5) for /proc/net/snmp."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def main(elements: int) -> None:
    with collectives.connect("mpi", collectives.Settings(spins=0)) as communicator:
        mine = np.full(elements, communicator.rank + 1, np.float32)
        out = communicator.ordered_all_reduce([mine])
        before = carried()
        communicator.ordered_all_reduce([mine], out)
        sent, received, again = (now - then for now, then in zip(carried(), before, strict=True))
        is_right = bool((out == communicator.size * (communicator.size + 1) / 2).all())
        print(json.dumps([sent, received, again, communicator.mechanism, is_right]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
