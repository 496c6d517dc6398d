"""Open MPI's settings while it starts in this process."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""Variables that identify a process started by mpirun or srun."""
SIZE_VARIABLE, LOCAL_SIZE_VARIABLE = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
MESSAGES_VARIABLE, TRANSPORTS_VARIABLE = "OMPI_MCA_pml", "OMPI_MCA_btl"
CHOSEN_VARIABLES = (MESSAGES_VARIABLE, "OMPI_MCA_mtl", TRANSPORTS_VARIABLE)
"""Variables that choose Open MPI's transports; if one of them is set, the choice is the user's or poprun's."""
NETWORKS_VARIABLE = "OMPI_MCA_btl_tcp_if_include"
LOOPBACK = "lo"
"""Value of NETWORKS_VARIABLE if poprun starts all instances on one host."""
_DESCRIPTORS = 18  # measured with 2 ranks of one host, Open MPI 5.0.11
FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")
"""Folders in which Linux lists the network devices that libfabric uses: InfiniBand, RoCE, EFA, Omni-Path, Slingshot."""


@contextmanager
def open_mpi_prepared() -> Iterator[None]:
    """Set our defaults for variables that the environment leaves unset; initialise MPI inside the `with` block.

    Raises:
        OSError: The limit on file descriptors is too low for MPI, which would end this process in an unclear way.
    """
    before = set(os.listdir("/proc/self/fd"))
    _check_descriptors(len(before))
    # Let MPI yield its core while it waits. By default it busy-waits, which is fastest if each waiting thread has its
    # own core. If it shares a core with a computing thread, it takes up to 40 % of that core.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    chosen = transports(os.environ, any(os.path.isdir(folder) and os.listdir(folder) for folder in FABRICS))
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            del os.environ[name]  # a job started by this process needs other transports
    is_loopback = os.environ.get(NETWORKS_VARIABLE) == LOOPBACK
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as opened:
                    _prepare(opened, is_loopback)


def transports(environ: Mapping[str, str], has_fabric: bool) -> dict[str, str]:
    """Return the variables that keep Open MPI from probing networks that this process cannot use.

    Open MPI (5.0.11) sleeps for a second when it closes an unused `btl ofi`, on every host without a fabric.

    Args:
        environ: Environment variables of the process.
        has_fabric: Whether this host has a network device for libfabric.
    """
    if TRANSPORTS_VARIABLE in environ:
        return {}
    if not any(name in environ for name in RANK_VARIABLES):
        # A process without a launcher shares memory with no other process. Open MPI 5.0.11 would leave its file in
        # /dev/shm behind: only mpirun removes these files.
        return {TRANSPORTS_VARIABLE: "^sm,ofi,uct"}
    if any(name in environ for name in CHOSEN_VARIABLES):
        return {}
    size = environ.get(SIZE_VARIABLE)
    if size is not None and environ.get(LOCAL_SIZE_VARIABLE) == size:
        return {MESSAGES_VARIABLE: "ob1", TRANSPORTS_VARIABLE: "^ofi,uct"}
    return {} if has_fabric else {TRANSPORTS_VARIABLE: "^ofi"}


def _check_descriptors(used: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit - used < _DESCRIPTORS:
        raise OSError(
            errno.EMFILE,
            f"MPI needs {_DESCRIPTORS} file descriptors, but this process may open {limit} and has {used} open; raise "
            "the limit, for example with: ulimit -n 1024",
        )


def _prepare(opened: socket.socket, is_loopback: bool) -> None:
    """Let a TCP connection of Open MPI send at once; bind a listening socket to the loopback interface if asked.

    PMIx sends two short messages in MPI_Finalize. Without TCP_NODELAY the second waits 40 ms for the delayed ACK.

    Open MPI (5.0.11) refuses connections over networks that it should not use, but its sockets listen on all networks.
    Linux allows this binding to unprivileged processes since 5.7.
    """
    if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
        return
    if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    elif is_loopback:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK.encode())


_FINALIZED = 5  # OMPI_MPI_STATE_FINALIZE_COMPLETED of Open MPI 5.0


def look_finalized(library: str) -> None:
    """Let MPI look finalized at the end of this process, a forked child whose parent goes on using MPI.

    mpi4py finalizes MPI at the very end of Python, unless the program has set `mpi4py.rc.finalize` before its first
    import. A child would wait there for ever, on connections of its parent. Other MPI libraries are left as they are.

    Args:
        library: Path of a loaded library that is linked with MPI.
    """
    with suppress(OSError, ValueError):  # ValueError: the library has no such variable
        ctypes.c_int32.in_dll(ctypes.CDLL(library), "ompi_mpi_state").value = _FINALIZED
