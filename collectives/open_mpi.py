"""What we ask of Open MPI while it starts in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Set for the processes that mpirun or srun has started."""
TRANSPORTS_VARIABLE = "OMPI_MCA_btl"


@contextmanager
def open_mpi_prepared() -> Iterator[None]:
    """Choose what suits us where the environment does not say otherwise; MPI is to be initialised inside."""
    _yield_when_idle()
    if TRANSPORTS_VARIABLE in os.environ or any(name in os.environ for name in RANK_VARIABLES):
        yield
        return
    # Nobody shares memory with a process that no launcher has started, and Open MPI 5.0.11 leaves its file in /dev/shm
    # there, which mpirun removes for those that it starts.
    os.environ[TRANSPORTS_VARIABLE] = "^sm"
    try:
        yield
    finally:
        del os.environ[TRANSPORTS_VARIABLE]  # a job that this process starts is to have it


def _yield_when_idle() -> None:
    """Have MPI offer its core to others while it waits.

    It busy-waits by default. That is the fastest where each waiting thread has a core of its own, and takes up to
    40 % of a core that it shares with a thread that computes.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
