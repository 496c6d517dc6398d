"""Open MPI's settings while it starts in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Variables that identify a process started by mpirun or srun."""
TRANSPORTS_VARIABLE = "OMPI_MCA_btl"
NETWORKS_VARIABLE = "OMPI_MCA_btl_tcp_if_include"
LOOPBACK = "lo"
"""Value of NETWORKS_VARIABLE if poprun starts all instances on one host."""


@contextmanager
def open_mpi_prepared() -> Iterator[None]:
    """Set our defaults for variables that the environment leaves unset; initialise MPI inside the `with` block."""
    _yield_when_idle()
    if TRANSPORTS_VARIABLE in os.environ or any(name in os.environ for name in RANK_VARIABLES):
        with _kept_to_loopback() if os.environ.get(NETWORKS_VARIABLE) == LOOPBACK else nullcontext():
            yield
        return
    # A process without a launcher shares memory with no other process. Open MPI 5.0.11 would leave its file in /dev/shm
    # behind: only mpirun removes these files.
    os.environ[TRANSPORTS_VARIABLE] = "^sm"
    try:
        yield
    finally:
        del os.environ[TRANSPORTS_VARIABLE]  # a job started by this process needs shared memory


def _yield_when_idle() -> None:
    """Let MPI yield its core while it waits.

    By default MPI busy-waits. That is fastest if each waiting thread has a core of its own. If it shares a core with a
    computing thread, it takes up to 40 % of that core.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


@contextmanager
def _kept_to_loopback() -> Iterator[None]:
    """Bind TCP sockets that start to listen inside the `with` block to the loopback interface.

    Open MPI (5.0.11) refuses connections over networks that it should not use, but its sockets listen on all networks.
    Linux allows this binding to unprivileged processes since 5.7.
    """
    before = set(os.listdir("/proc/self/fd"))
    yield
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as listening:
            is_tcp = listening.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK.encode())
