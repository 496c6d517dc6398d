"""What we ask of Open MPI before it starts in this process."""

from __future__ import annotations

import os


def yield_when_idle() -> None:
    """Have MPI offer its core to others while it waits, unless the environment says what it should do.

    It busy-waits by default. That is the fastest where each waiting thread has a core of its own, and takes up to
    40 % of a core that it shares with a thread that computes.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
