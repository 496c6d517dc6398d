"""The backend within one process: every rank is a thread. For tests, debugging and notebooks."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from collectives.communicator import Communicator
from collectives.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from collectives.factory import RankGroup, Settings, assemble
from collectives.plans.spread import host_numbers
from collectives.point_to_point.link import Link, Transfer

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def _nothing(source: int, to: int) -> None:
    """Let the message pass."""


class ThreadHub:
    """The meeting point of the threads of one group.

    A rank may be lost, as a process may. It then goes as between processes over MPI with ULFM: those who wait for the
    lost rank get `PeerLostError`; the first of them who wants to go on without it revokes the hub, which ends the waits
    of all others; and all who are left meet again in a smaller hub, in the same order. See `connect_survivors`.

    Args:
        size: the number of ranks.
        before_send: called in the thread of a rank that is about to send a message over a link, with the ranks of the
            sender and of the receiver; what it raises goes to the sender. A place for faults: whoever is lost there has
            sent all messages before, and none after.
        hosts: what the host of each rank is called; default: all are on one for the window, and apart for the ring.
    """

    def __init__(
        self, size: int, before_send: Callable[[int, int], None] = _nothing, hosts: Sequence[Hashable] = ()
    ) -> None:
        if size < 1:
            raise ValueError(f"a group of {size} ranks; it needs at least one")
        self.size = size
        self.hosts = tuple(hosts)
        self.before_send = before_send
        self._changed = threading.Condition()
        self._queues: defaultdict[tuple[int, int, int, int], queue.SimpleQueue[np.ndarray]] = defaultdict(
            queue.SimpleQueue
        )
        self._subgroups: dict[tuple[tuple[int, ...], int], ThreadHub] = {}
        self._joined: defaultdict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._lost: dict[int, str] = {}
        self._is_revoked = False
        self._leaving: set[int] = set()
        self._smaller: tuple[ThreadHub, list[int]] | None = None  # and which ranks of this hub are its ranks

    def queue_for(self, channel: int, source: int, to: int, lane: int) -> queue.SimpleQueue[np.ndarray]:
        """Return the messages of one lane from one rank to another."""
        with self._changed:
            return self._queues[channel, source, to, lane]

    def subgroup(self, ranks: tuple[int, ...], rank: int) -> ThreadHub:
        """Return the hub of some of the ranks; each call of a rank with the same ranks gets the next such group."""
        with self._changed:
            turn = self._joined[ranks, rank]
            self._joined[ranks, rank] += 1
            found = self._subgroups.get((ranks, turn))
            if found is None:
                found = self._subgroups[ranks, turn] = self._part(ranks)
                self._tell(found, ranks)
            return found

    # ---- losing ranks

    def lose(self, rank: int, why: str = "") -> None:
        """Have a rank lost: waits for it end, what it sent before still arrives, and nothing comes from it any more.

        Also in subgroups, and in the smaller hub where the ranks have met again meanwhile.

        Args:
            rank: which one.
            why: what errors say about it; default: that it is lost.
        """
        with self._changed:
            if self._smaller is not None:
                smaller, left = self._smaller
                if rank in left:
                    smaller.lose(left.index(rank), why)
                return
            self._lost.setdefault(rank, why or f"rank {rank} is lost")
            self._tell_subgroups()
            self._meet_if_all_have_come()

    def revoke(self) -> None:
        """End all waits in this hub and its subgroups, now and in future; what has arrived already is still taken."""
        with self._changed:
            self._is_revoked = True
            self._tell_subgroups()

    def why_lost(self, rank: int) -> str:
        """Return what was said when a rank was lost; empty while it is not."""
        return self._lost.get(rank, "")

    def why_not_wait(self, rank: int, awaited: Sequence[int]) -> str:
        """Return why it is useless for a rank to wait for some others; empty while it is not."""
        reasons = [self._lost[each] for each in (rank, *awaited) if each in self._lost]
        if not reasons and self._is_revoked:
            reasons = [*self._lost.values()] or ["the others go on without this group"]
        return "; ".join(reasons)

    def newest(self, rank: int) -> tuple[ThreadHub, int]:
        """Return the smallest hub in which a rank of this hub has met the others, and the number of the rank there."""
        hub = self
        while hub._smaller is not None and rank in hub._smaller[1]:
            hub, left = hub._smaller
            rank = left.index(rank)
        return hub, rank

    def survivors(self) -> list[int]:
        """Return the ranks of this hub that have met in the smallest one, in its order."""
        ranks, hub = list(range(self.size)), self
        while hub._smaller is not None:
            hub, left = hub._smaller
            ranks = [ranks[number] for number in left]
        return ranks

    def shrink(self, rank: int, limit_s: float) -> None:
        """Meet again without the ranks that are lost; returns when all who are left have called it.

        `newest` is then the smaller hub, whose ranks are those that are left, in the same order.

        Raises:
            CollectiveTimeoutError: after `limit_s` seconds.
            PeerLostError: if this rank is lost itself.
        """
        with self._changed:
            self._leaving.add(rank)
            self._meet_if_all_have_come()
            came = self._changed.wait_for(lambda: self._smaller is not None or rank in self._lost, limit_s)
            if rank in self._lost:
                raise PeerLostError(f"rank {rank} cannot go on with the others: {self._lost[rank]}")
            if not came:
                missing = sorted(set(range(self.size)) - self._lost.keys() - self._leaving)
                raise CollectiveTimeoutError(
                    f"rank {rank} has waited for rank {', '.join(map(str, missing))} to go on without those that are "
                    f"lost: gave up after timeout_s = {limit_s:g}"
                )

    def _part(self, ranks: Sequence[int]) -> ThreadHub:
        hosts = [self.hosts[rank] for rank in ranks] if self.hosts else ()
        return ThreadHub(len(ranks), lambda source, to: self.before_send(ranks[source], ranks[to]), hosts)

    def _meet_if_all_have_come(self) -> None:
        left = [rank for rank in range(self.size) if rank not in self._lost]
        if self._smaller is None and left and self._leaving.issuperset(left):
            self._smaller = self._part(left), left
        self._changed.notify_all()

    def _tell_subgroups(self) -> None:
        for (ranks, _), hub in self._subgroups.items():
            self._tell(hub, ranks)

    def _tell(self, hub: ThreadHub, ranks: tuple[int, ...]) -> None:
        """Have the hub of some of the ranks lose those of them that are lost here."""
        for number, rank in enumerate(ranks):
            if rank in self._lost:
                hub.lose(number, self._lost[rank])
        if self._is_revoked:
            hub.revoke()


class _Sent:
    """Messages between threads are copied at once."""

    received = None

    def done(self) -> bool:
        return True


class _Receive:
    def __init__(self, messages: queue.SimpleQueue[np.ndarray], into: np.ndarray) -> None:
        self._messages = messages
        self._into = into
        self.received: int | None = None

    def done(self) -> bool:
        if self.received is None:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return False
            self._into[: message.size] = message
            self.received = message.size
        return True


class ThreadLink(Link):
    """Queues between the threads of one process."""

    def __init__(self, hub: ThreadHub, rank: int, channel: int) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._channel = channel

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        self._hub.before_send(self.rank, to)
        if why := self._hub.why_lost(self.rank):
            raise PeerLostError(why)
        self._hub.queue_for(self._channel, self.rank, to, lane).put(data.copy())
        return _Sent()

    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        messages = self._hub.queue_for(self._channel, source, self.rank, lane)
        return _Receive(messages, into)


def connect(settings: Settings, hub: ThreadHub, rank: int, instances: Sequence[int] | None = None) -> Communicator:
    """Join the group that meets at `hub` as `rank`; returns when all ranks have joined.

    The default mechanism is the ring; "window" reduces in shared memory as processes of one host do.
    """
    settings = replace(settings, spins=0)  # a spinning thread would keep the interpreter from the others
    members = instances if instances is not None else range(hub.size)
    group = RankGroup(rank, [f"rank {number}" for number in range(hub.size)], members, partial(hub.why_not_wait, rank))

    def make_subgroup(ranks: Sequence[int]) -> Communicator:
        of_ranks = hub.subgroup(tuple(ranks), rank)
        return connect(settings, of_ranks, ranks.index(rank), [members[number] for number in ranks])

    links = (ThreadLink(hub, rank, 0), ThreadLink(hub, rank, 1))
    share_memory = settings.mechanism == "window"
    for link in links:
        link.hosts = host_numbers(hub.hosts) or (0,) * hub.size * share_memory
    return assemble(settings, group, links, share_memory, make_subgroup)


def connect_survivors(settings: Settings, hub: ThreadHub, rank: int) -> Communicator:
    """Join those that are left of a group in which others are lost; all of them call this, and again if one is then.

    What they had connected before is of no use any more. As `connect_survivors` of the backend over MPI.

    Args:
        settings: as for `connect`.
        hub: where all of them met at first.
        rank: this rank's number there.

    Raises:
        CollectiveTimeoutError: if one that is not lost does not come within `timeout_s`.
        PeerLostError: if this rank is lost itself, or the others are lost faster than they meet.
    """
    for _ in range(hub.size):
        present, number = hub.newest(rank)
        present.revoke()
        present.shrink(number, settings.limits.timeout_s)
        smaller, number = hub.newest(rank)
        settings.progress.carry_on(hub.size - smaller.size)
        try:
            return connect(settings, smaller, number, hub.survivors())
        except CollectiveError as error:
            logger.info("another rank was lost while the others connected anew: %s", error)
    raise PeerLostError("the ranks that are left could not connect anew")


def run_on_threads(
    size: int,
    function: Callable[[Communicator], Result],
    settings: Settings | None = None,
    hosts: Sequence[Hashable] = (),
) -> list[Result]:
    """Run `function(communicator)` once per rank, each in a thread of its own; the results in rank order.

    When one rank raises, waits of the others end with `PeerLostError`, and the first exception is raised here.

    Args:
        size: the number of ranks.
        function: the program; its communicator is closed when it returns.
        settings: limits and mechanism of the communicators.
        hosts: as for `ThreadHub`.
    """
    hub = ThreadHub(size, hosts=hosts)
    errors: list[BaseException] = []  # as they came: all but the first may follow from it

    def run(rank: int) -> Result:
        try:
            with connect(settings or Settings(), hub, rank) as communicator:
                return function(communicator)
        except BaseException as error:
            errors.append(error)
            hub.lose(rank, f"rank {rank} has failed: {type(error).__name__}: {error}")
            hub.revoke()
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
