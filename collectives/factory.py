"""The assembly of a communicator from the links of a backend."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collectives.communicator import Communicator
from collectives.errors import PeerRefusedError
from collectives.hosts.hosts_link import HostsLink, ranks_beside
from collectives.hosts.near import NearLink, memory_bytes
from collectives.instruments import Instruments
from collectives.named import NamedQueue
from collectives.plans.network import Network
from collectives.point_to_point.link import Link
from collectives.point_to_point.transport import PointToPointTransport
from collectives.shared_memory.segment import SHARED_MEMORY_DIR, channel_bytes, share_segment
from collectives.shared_memory.transport import SharedMemoryTransport
from collectives.transport import Transport
from collectives.waiting import SPINS, Limits, Watch

logger = logging.getLogger(__name__)

MECHANISMS = ("auto", "window", "ring")

MakeSubgroup = Callable[[Sequence[int]], Communicator]


@dataclass(frozen=True)
class Settings:
    """The options of all backends.

    Attributes:
        limits: Limits of waits, with the clock that measures them.
        progress: Instruments that observe this rank.
        mechanism: "window" (shared memory between all ranks or between the ranks of each host), "ring" (messages only),
            or "auto": the window if hosts have several ranks and enough shared memory, else the ring.
        shared_memory_dir: Directory of shared memory files.
        spins: Number of polls of a wait before it offers its core to others.
        network: Costs of messages and sums, for the choice of plans; default: costs for most networks.
    """

    limits: Limits = field(default_factory=Limits)
    progress: Instruments = field(default_factory=Instruments)
    mechanism: str = "auto"
    shared_memory_dir: Path = SHARED_MEMORY_DIR
    spins: int = SPINS
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise ValueError(f"mechanism is {self.mechanism!r}; use one of {', '.join(MECHANISMS)}")


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a communicator, seen from one of them.

    Attributes:
        rank: This rank.
        names: Name of each rank in messages.
        instances: Instance of each rank, for instruments.
        lost: Function that returns why waiting for the given ranks is useless, or "" if it is not.
        gives_up: Function that gives up the ranks that are about to join, see `Watch`.
    """

    rank: int
    names: Sequence[str]
    instances: Sequence[int]
    lost: Callable[[Sequence[int]], str] = lambda awaited: ""
    gives_up: Callable[[], bool] = lambda: False

    def watch(self, settings: Settings) -> Watch:
        """Return a new watch for one channel of this group."""
        watch = Watch(self.rank, self.names, self.instances, settings.limits, settings.progress, settings.spins)
        watch.lost, watch.gives_up = self.lost, self.gives_up
        return watch


def refuse_other_networks(networks: Sequence[Network | None]) -> None:
    """Refuse ranks with different network costs: they would choose different plans and wait for each other's messages.

    Raises:
        PeerRefusedError: The costs differ. Raised on all ranks.
    """
    others = [rank for rank, network in enumerate(networks) if network != networks[0]]
    if others:
        raise PeerRefusedError(
            f"rank 0 chooses plans by {_costs_of(networks[0])}, rank {others[0]} by {_costs_of(networks[others[0]])}; "
            "give all ranks the same costs"
        )


def _costs_of(network: Network | None) -> str:
    return "the usual costs" if network is None else str(network)


def assemble(
    settings: Settings, group: RankGroup, links: tuple[Link, Link], share_memory: bool, make_subgroup: MakeSubgroup
) -> Communicator:
    """Build a communicator over two independent links; a collective call.

    One link serves the synchronous collectives, the other one the named collectives.

    Args:
        settings: Options, the same on all ranks.
        group: Ranks of the communicator.
        links: Links that connect all ranks of the group and know the ranks' hosts.
        share_memory: Whether ranks of one host may share memory.
        make_subgroup: Function that connects some of the ranks.

    Raises:
        RuntimeError: Mechanism "window" was asked for, but shared memory is not available. If no two ranks share a
            host, they use messages instead, without an error.
    """
    watches = (group.watch(settings), group.watch(settings))
    for link, watch in zip(links, watches, strict=True):
        watch.pausing = link.pausing
        if settings.network is not None:
            link.costs, link.are_costs_measured = settings.network, True
    by_messages = [PointToPointTransport(link, watch) for link, watch in zip(links, watches, strict=True)]
    hosts = links[0].hosts
    beside = Counter(hosts).most_common(1)[0][1] if hosts else 1  # the largest number of ranks on one host
    sharing = _share_memory if beside == len(hosts) else _share_memory_within_hosts
    is_of_use = beside > 1 or len(hosts) == 1
    is_tried = share_memory and is_of_use and settings.mechanism != "ring"
    shared = sharing(settings, by_messages[0], watches, links) if is_tried else None
    if shared is None and settings.mechanism == "window" and (is_of_use or not share_memory):
        raise RuntimeError(
            f"mechanism 'window' needs ranks that share a host and enough room in {settings.shared_memory_dir}; "
            "use 'auto' or 'ring', or make more room"
        )
    main, named = shared or by_messages
    mechanism = "window" if isinstance(main, SharedMemoryTransport) else "window and ring" if shared else "ring"
    logger.debug("%s: %d ranks, %s", group.names[group.rank], len(group.names), mechanism)
    queue = NamedQueue(named, watches[1])
    return Communicator(main, watches[0], queue, settings.progress, make_subgroup, mechanism)


def _share_memory(
    settings: Settings, transport: Transport, watches: tuple[Watch, Watch], links: tuple[Link, Link]
) -> tuple[Transport, Transport] | None:
    """Replace the links by transports through memory that all ranks share; return None if there is no such memory."""
    channel = channel_bytes(transport.size)
    segment = share_segment(transport, 2 * channel, settings.shared_memory_dir)
    if segment is None:
        return None
    for link in links:
        link.close()
    memory = memoryview(segment)
    main, named = (
        SharedMemoryTransport(
            memory[number * channel : (number + 1) * channel],
            transport.rank,
            transport.size,
            watch,
            settings.shared_memory_dir,
        )
        for number, watch in enumerate(watches)
    )
    return main, named


def _share_memory_within_hosts(
    settings: Settings, transport: Transport, watches: tuple[Watch, Watch], links: tuple[Link, Link]
) -> tuple[Transport, Transport] | None:
    """Return transports that use shared memory within a host and the links between hosts; None without memory."""
    beside = ranks_beside(links[0])
    channel = memory_bytes(len(beside))
    segment = share_segment(transport, 2 * channel, settings.shared_memory_dir, links[0].hosts)
    if segment is None:
        return None
    memory, number = memoryview(segment), beside.index(transport.rank)
    nears = [NearLink(memory[start : start + channel], number, len(beside)) for start in (0, channel)]
    of_hosts = [HostsLink(link, near) for link, near in zip(links, nears, strict=True)]
    for link, watch in zip(of_hosts, watches, strict=True):
        watch.pausing = link.pausing
    main, named = (PointToPointTransport(link, watch) for link, watch in zip(of_hosts, watches, strict=True))
    return main, named
