"""One rank of an MPI job with scarce shared memory: `window_job.py MECHANISM DIRECTORY SCARCITY [HOST...]`.

The names of the hosts of the ranks may follow; without them, all ranks are on the machine's own host.

The job prints one line per rank: the mechanism in use, or the error.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import collectives
import collectives.backends.mpi  # before files become scarce


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def limit_open_files_of_the_last_rank() -> None:
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


SCARCITY = {
    "small files": limit_file_size,
    "no file on one rank": limit_open_files_of_the_last_rank,
    "no room": lambda: None,
    "plenty": lambda: None,
}


def main(mechanism: str, directory: Path, scarcity: str, *hosts: str) -> str:
    MPI.COMM_WORLD.Barrier()
    SCARCITY[scarcity]()
    settings = collectives.Settings(mechanism=mechanism, shared_memory_dir=directory)
    try:
        communicator = collectives.connect("mpi", settings, host=hosts[MPI.COMM_WORLD.rank] if hosts else "")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (hard, hard))
    with communicator:
        communicator.barrier()  # the rank that made the file has removed it before
        assert list(directory.glob("*")) == []
        for length in (7, 1_000_003):
            arrays = [np.full(length, communicator.rank + number, np.float32) for number in range(2)]
            out = communicator.allocate((length,), np.float32)
            communicator.barrier()
            assert list(directory.glob("*")) == []
            assert (communicator.ordered_all_reduce(arrays, out) == communicator.size**2).all()
            assert (communicator.ordered_all_reduce(arrays) == communicator.size**2).all()
        communicator.barrier()
        return communicator.mechanism


if __name__ == "__main__":
    line = main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    sys.stdout.write(f"rank: {line}\n")
