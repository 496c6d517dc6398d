"""The backend over gRPC: workers that share only a network and know each other's addresses."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from typing_extensions import override

from collectives.communicator import Communicator
from collectives.errors import CollectiveError, PeerLostError
from collectives.factory import RankGroup, Settings, assemble
from collectives.instruments import Instruments
from collectives.network.addresses import Address
from collectives.network.lanes import SMALL_BYTES, CopiedMessage, Fetched, Inbox, Outbox, Received, Sent
from collectives.network.node import Node
from collectives.network.recovery import Recovery
from collectives.network.security import Security
from collectives.network.wire import MESSAGE_BYTES
from collectives.point_to_point.link import EXCHANGE, Fetch, Link, Mail, Sizes, Transfer

SIZES = Sizes(
    whole_bytes=2 * MESSAGE_BYTES,  # two workers exchange halves
    chunk_bytes=1 << 20,  # 16 MiB between 4 workers on 2 cores takes 0.8 times as long as with chunks of half the size
    smallest_chunk_bytes=1 << 20,
    opening_bytes=1 << 20,
    gathered_bytes=1 << 16,
)

logger = logging.getLogger(__name__)

ALL = "all"
_BESIDE = 2  # the channel of messages outside of collectives
_WAITING = -1  # the membership of a worker that waits to join
_PAIR = 2
_COPIED = CopiedMessage()


def sizes_for(workers: int) -> Sizes:
    """Return the sizes of messages for a group; a pair gathers longer sums, because no plan would send fewer bytes."""
    return replace(SIZES, gathered_bytes=SIZES.opening_bytes) if workers == _PAIR else SIZES


class GrpcLink(Link):
    """One channel of a group of workers; each lane to each worker is one gRPC stream.

    Args:
        node: This worker.
        group: Name of the group, the same on all its members.
        channel: Number of the channel: 0 and 1 of collectives, 2 of other messages.
        members: Ranks of the group's members in the cluster, in the group's order.
        epoch: Number of the membership to which the group belongs.

    Attributes:
        node: This worker.
        members: Ranks of the group's members in the cluster, in the group's order.
        epoch: Number of the membership to which the group belongs.
    """

    def __init__(self, node: Node, group: str, channel: int, members: Sequence[int], epoch: int) -> None:
        self.rank = members.index(node.rank)
        self.size = len(members)
        self.sizes = sizes_for(self.size)
        self.node = node
        self.epoch = epoch
        self._group = group
        self._channel = f"{group}/{channel}"
        self.members = members
        self._outboxes: dict[tuple[int, int], Outbox] = {}
        self._inboxes: dict[tuple[int, int], Inbox] = {}
        self._complaints = [partial(self._complain, source) for source in range(self.size)]
        self._bell = node.bell(self._channel)
        self.pause = self._bell.wait

    def begin(self) -> str:
        """Open streams for exchanges to all other members, and return the name of their lane.

        Streams open by themselves when the first collective sends. If that collective is also the last, it runs at the
        interpreter's exit. Python 3.12.0 and 3.12.1 cannot start the streams' threads then.
        """
        for to in range(self.size):
            if to != self.rank:
                self._outbox(to, EXCHANGE)
        return f"{self._channel}/{EXCHANGE}"

    @override
    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        if data.size <= SMALL_BYTES:
            self._outbox(to, lane).put(data.tobytes())
            return _COPIED
        sent = Sent(data)
        self._outbox(to, lane).put(sent)
        return sent

    @override
    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        if data.size > SMALL_BYTES:
            return [self.send(data, each, lane) for each in to]
        message = data.tobytes()
        for each in to:
            self._outbox(each, lane).put(message)
        return [_COPIED] * len(to)

    @override
    def send_joined(self, parts: Sequence[np.ndarray], to: int, lane: int) -> Sequence[Transfer]:
        self._outbox(to, lane).put(b"".join([part.view(np.uint8).data for part in parts]))
        return ()

    @override
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        return Received(self._inbox(source, lane), into, self._complaints[source])

    @override
    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        return Fetched(self._inbox(source, lane), room.size, room.size, self._complaints[source])

    @override
    def fetch_up_to(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        return Fetched(self._inbox(source, lane), 0, room.size, self._complaints[source])

    @override
    def mail(self, ranks: Sequence[int], lane: int) -> Mail:
        puts = [self._outbox(rank, lane).put for rank in ranks]
        return Mail(puts, [self._inbox(rank, lane) for rank in ranks], self._bell.wait)

    def _outbox(self, to: int, lane: int) -> Outbox:
        outbox = self._outboxes.get((to, lane))
        if outbox is None:
            outbox = self.node.outbox(self.members[to], f"{self._channel}/{lane}", self.epoch)
            self._outboxes[to, lane] = outbox
        return outbox

    def _inbox(self, source: int, lane: int) -> Inbox:
        inbox = self._inboxes.get((source, lane))
        if inbox is None:
            inbox = self.node.inbox(self.members[source], f"{self._channel}/{lane}")
            self._inboxes[source, lane] = inbox
        return inbox

    def _complain(self, source: int, why: str) -> None:
        self.node.lose(self.node.peers[self.members[source]], why)

    @override
    def end(self, is_complete: bool) -> None:
        node = self.node
        if self._group == node.group:
            node.has_finished, node.may_reconnect = is_complete, not is_complete and node.shrinks

    def close(self) -> None:
        """End both channels of the group. If the group has all workers that are left, leave the cluster as well."""
        node = self.node
        if self._group == node.group and not node.may_reconnect:
            node.leave()
        elif self.epoch < node.epoch:
            node.drop_lanes(f"{self._group}/")
        else:
            node.end_lanes(f"{self._group}/")


def connect(
    settings: Settings,
    addresses: Sequence[str],
    rank: int,
    *,
    names: Sequence[str] | None = None,
    description: str = "",
    security: Security | None = None,
    shrinks: bool = False,
) -> Communicator:
    """Join the workers at `addresses` as `rank`; return when streams connect this worker with all others, both ways.

    Workers may start in any order, up to `settings.limits.connect_timeout_s` apart. A worker listens at its own address
    only. Plaintext is allowed on loopback addresses only (`collectives.network.security`).

    Args:
        settings: Limits, progress record and network costs; the mechanism is always the ring.
        addresses: Addresses of all workers in rank order: `host:port`, `[IPv6]:port` or `unix:/path`.
        rank: Position of this worker in `addresses`.
        names: Names of the workers in messages, shown beside their addresses; default: "rank 0", "rank 1", ...
        description: Further facts on which all workers must agree, e.g. the number of replicas.
        security: Certificates and token; default: from the environment variables POPDIST_TLS_... and POPDIST_JOB_TOKEN.
        shrinks: Whether the others may go on if a worker is lost, see `connect_survivors`; the same on all workers.

    Raises:
        ValueError: An address is invalid or listed twice, or `rank` has no address.
        SecurityError: Plaintext would leave this machine, or the certificates cannot be used. With `shrinks`, a worker
            listens at a TCP port without certificates and token.
        PeerRefusedError: This worker cannot listen at its address, or another worker refuses it.
        CollectiveTimeoutError: Some workers did not come in time.
    """
    parsed = [Address.parse(text) for text in addresses]
    if len(set(parsed)) < len(parsed):
        raise ValueError(f"the addresses {', '.join(addresses)} name one worker twice; each needs its own")
    if not 0 <= rank < len(parsed):
        raise ValueError(f"rank is {rank}, but there are {len(parsed)} addresses; ranks are 0 to {len(parsed) - 1}")
    titles = names or [f"rank {number}" for number in range(len(parsed))]
    full_names = [f"{title} at {address.text}" for title, address in zip(titles, parsed, strict=True)]
    security = security or Security.from_environ(os.environ)
    if settings.network is not None:
        description = ", ".join(filter(None, [description, f"plans by {settings.network}"]))
    if shrinks:
        description = ", ".join(filter(None, [description, "going on without lost workers"]))
    node = Node(parsed, full_names, rank, description, security, settings.limits, shrinks)
    node.join()
    recovery = node.recovery
    if recovery is None or recovery.agreement.is_member:
        return _communicator_of_all(settings, node, 0, range(len(parsed)))
    logger.warning(
        "%s was started again; it joins %s", node.names[rank], recovery.named(recovery.agreement.view.members)
    )
    import collectives  # which loads backends by their names

    alone = collectives.connect("single", replace(settings, progress=Instruments()))
    alone.beside = _journal_link(node, recovery.agreement.view.leader, rank, _WAITING)
    return alone


# ---- workers that were started again


def is_waiting(communicator: Communicator) -> bool:
    """Return whether this is the communicator of a worker that was started again, and waits to join the others.

    Such a communicator has only this rank. Its `beside` is a link with rank 0, the worker that brings it up.
    """
    link = communicator.beside
    return isinstance(link, GrpcLink) and link.epoch == _WAITING


def may_join(communicator: Communicator, has_read: int) -> None:
    """Tell the others how many results this waiting worker has read; it may join if they have passed on no more.

    Args:
        communicator: Communicator of this waiting worker.
        has_read: Number of results that it has read.
    """
    recovery = _recovery_of(communicator)
    if recovery.has_read != has_read:
        recovery.has_read = has_read
        _link_of(communicator).node.tell_change()


def let_join(communicator: Communicator, entries: int) -> None:
    """Let the worker of `joiner_of` join if it has read `entries` results, and is connected with all members."""
    _recovery_of(communicator).let_join(entries)


def have_joined(communicator: Communicator) -> None:
    """Note that all workers of this communicator have worked together, also the ones that have just joined.

    Before that, a wait that reaches `timeout_s` gives up the workers that join, and raises no error.
    """
    _recovery_of(communicator).have_joined(_link_of(communicator).epoch)


def has_joined(communicator: Communicator) -> bool:
    """Return whether the others have let this waiting worker join; then call `connect_survivors`.

    Raises:
        PeerLostError: The worker that brings it up is gone.
    """
    link = _link_of(communicator)
    if _recovery_of(communicator).agreement.is_member:
        return True
    source = link.node.peers[link.members[0]]
    if source.is_lost or source.has_left:
        raise PeerLostError(f"{source.name} is gone, which brought this worker up; start this worker again")
    return False


def is_revoked(communicator: Communicator) -> bool:
    """Return whether the members change, so that calls of this communicator fail if they have to wait."""
    return bool(_recovery_of(communicator).agreement.why_revoked(_link_of(communicator).epoch))


def joiner_of(communicator: Communicator) -> Link | None:
    """Return a link with the worker that waits to join, as rank 1; the same one each time.

    Returns:
        None if nobody waits, or if another worker brings it up.
    """
    node, peer = _link_of(communicator).node, _recovery_of(communicator).joiner
    if peer is None:
        return None
    if peer.journal is None:
        peer.journal = _journal_link(node, node.rank, peer.rank, node.epoch)
    link: Link = peer.journal
    return link


def _journal_link(node: Node, source: int, to: int, epoch: int) -> GrpcLink:
    return GrpcLink(node, f"journal.{source}.{to}", 0, [source, to], epoch)


def _link_of(communicator: Communicator) -> GrpcLink:
    link = communicator.link if isinstance(communicator.link, GrpcLink) else communicator.beside
    assert isinstance(link, GrpcLink)
    return link


def _recovery_of(communicator: Communicator) -> Recovery:
    recovery = _link_of(communicator).node.recovery
    if recovery is None:
        raise PeerLostError("these workers were not connected to go on after a loss; connect all with shrinks=True")
    return recovery


# ---- survivors


def connect_survivors(settings: Settings, lost: Communicator) -> Communicator:
    """Connect the workers that are left; all of them call this, and again after another loss.

    They agree on who is left (`collectives.network.survivors`). Messages of earlier communicators are never taken for
    messages of the new one; the caller abandons these communicators.

    Args:
        settings: Options, the same on all workers.
        lost: Communicator of this worker from `connect` with `shrinks`, from this function, or a subgroup of those.

    Raises:
        PeerLostError: The others go on without this worker, or so few are left that others might go on as well.
        ClosedError: All workers have finished.
        CollectiveTimeoutError: Some worker has not agreed within `timeout_s`.
    """
    link, recovery = _link_of(lost), _recovery_of(lost)
    node = link.node
    settings.progress.waiting_for([peer for peer in node.peers if peer not in node.losses])
    try:
        view = recovery.survive(link.epoch)
    except CollectiveError:
        node.leave()
        raise
    left = sorted(view.members)
    settings.progress.carry_on(len(node.names) - len(left))
    return _communicator_of_all(settings, node, view.epoch, left)


def _communicator_of_all(settings: Settings, node: Node, epoch: int, members: Sequence[int]) -> Communicator:
    """Return a communicator of all workers of a membership; closing it leaves the cluster."""
    node.may_reconnect = False
    node.group = f"all@{epoch}:{'.'.join(map(str, members))}" if epoch else ALL
    communicator = _communicator(replace(settings, spins=0), node, node.group, members, epoch)
    communicator.part = communicator.subgroup  # all groups share the connections of the cluster
    return communicator


def _communicator(settings: Settings, node: Node, group: str, members: Sequence[int], epoch: int) -> Communicator:
    subgroups: Counter[tuple[int, ...]] = Counter()

    def lost(awaited: Sequence[int]) -> str:
        return node.lost([members[rank] for rank in awaited], members, epoch)

    def gives_up() -> bool:
        return node.recovery is not None and node.recovery.give_up_joining()

    def make_subgroup(ranks: Sequence[int]) -> Communicator:
        chosen = tuple(members[rank] for rank in ranks)
        subgroups[chosen] += 1
        name = f"{group}+{'.'.join(map(str, chosen))}#{subgroups[chosen]}"
        return _communicator(settings, node, name, chosen, epoch)

    of_rank = members.index(node.rank)
    seen = RankGroup(of_rank, [node.names[member] for member in members], members, lost, gives_up)
    links = (GrpcLink(node, group, 0, members, epoch), GrpcLink(node, group, 1, members, epoch))
    lanes = {link.begin() for link in links}
    if group == ALL:  # other groups are made without waiting for their members
        node.await_streams(lanes)
    communicator = assemble(settings, seen, links, False, make_subgroup)
    communicator.beside = GrpcLink(node, group, _BESIDE, members, epoch)
    return communicator
