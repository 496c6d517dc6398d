"""The settings of Open MPI while it starts in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Set for the processes that mpirun or srun has started."""
TRANSPORTS_VARIABLE = "OMPI_MCA_btl"
NETWORKS_VARIABLE = "OMPI_MCA_btl_tcp_if_include"
LOOPBACK = "lo"
"""Its value where poprun starts all instances on one host."""


@contextmanager
def open_mpi_prepared() -> Iterator[None]:
    """Choose what suits us where the environment does not say otherwise; MPI is to be initialised inside."""
    _yield_when_idle()
    if TRANSPORTS_VARIABLE in os.environ or any(name in os.environ for name in RANK_VARIABLES):
        with _kept_to_loopback() if os.environ.get(NETWORKS_VARIABLE) == LOOPBACK else nullcontext():
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


@contextmanager
def _kept_to_loopback() -> Iterator[None]:
    """Have sockets that begin inside to listen to any network listen to the loopback interface only.

    Open MPI (5.0.11) turns away who calls over other networks than those it is told to use, but listens to all. The
    kernel lets us do this from Linux 5.7 on.
    """
    before = set(os.listdir("/proc/self/fd"))
    yield
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as listening:
            is_tcp = listening.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK.encode())
