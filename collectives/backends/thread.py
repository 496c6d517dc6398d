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
from typing_extensions import override

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

    A rank can be lost, like a process over MPI with ULFM. Ranks that wait for the lost rank get `PeerLostError`. The
    first rank to go on without it revokes the hub. That ends the waits of all others. The survivors then meet in a
    smaller hub, in the same order (`connect_survivors`).

    Args:
        size: Number of ranks.
        before_send: Called in the sender's thread before each message on a link, with the ranks of sender and receiver.
            An error that it raises reaches the sender. Tests lose a rank here: it has then sent all earlier messages
            and no later one.
        hosts: Name of each rank's host. Default: one host for the mechanism "window", separate hosts for "ring".
    """

    def __init__(
        self, size: int, before_send: Callable[[int, int], None] = _nothing, hosts: Sequence[Hashable] = ()
    ) -> None:
        if size < 1:
            raise ValueError(f"a group of {size} ranks is impossible; it needs at least one")
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
        self._smaller: tuple[ThreadHub, list[int]] | None = None  # with the ranks of this hub that are in it

    def queue_for(self, channel: int, source: int, to: int, lane: int) -> queue.SimpleQueue[np.ndarray]:
        """Return the queue of one lane from rank `source` to rank `to`."""
        with self._changed:
            return self._queues[channel, source, to, lane]

    def subgroup(self, ranks: tuple[int, ...], rank: int) -> ThreadHub:
        """Return the hub of some ranks. A rank's n-th call with equal `ranks` returns the n-th hub of these ranks."""
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
        """Declare a rank lost: waits for it end. Messages that it sent earlier still arrive; it sends no others.

        The rank is also lost in subgroups, and in the smaller hub if the ranks have already met again.

        Args:
            rank: The lost rank.
            why: Reason for error messages; default: "rank ... is lost".
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
        """End all present and future waits in this hub and its subgroups; arrived messages can be received."""
        with self._changed:
            self._is_revoked = True
            self._tell_subgroups()

    def why_lost(self, rank: int) -> str:
        """Return the reason why a rank is lost, or "" if it is not lost."""
        return self._lost.get(rank, "")

    def why_not_wait(self, rank: int, awaited: Sequence[int]) -> str:
        """Return why `rank` cannot receive anything more from the `awaited` ranks, or "" if it can."""
        reasons = [self._lost[each] for each in (rank, *awaited) if each in self._lost]
        if not reasons and self._is_revoked:
            reasons = [*self._lost.values()] or ["the others go on without this group"]
        return "; ".join(reasons)

    def newest(self, rank: int) -> tuple[ThreadHub, int]:
        """Return the smallest hub with `rank` as a member, and its rank there."""
        hub = self
        while hub._smaller is not None and rank in hub._smaller[1]:
            hub, left = hub._smaller
            rank = left.index(rank)
        return hub, rank

    def survivors(self) -> list[int]:
        """Return the ranks of this hub that have met in the smallest hub, in the smallest hub's order."""
        ranks, hub = list(range(self.size)), self
        while hub._smaller is not None:
            hub, left = hub._smaller
            ranks = [ranks[number] for number in left]
        return ranks

    def shrink(self, rank: int, limit_s: float) -> None:
        """Meet again without the lost ranks; return when all surviving ranks have called this.

        `newest` then returns the smaller hub, which numbers the surviving ranks in the same order.

        Raises:
            CollectiveTimeoutError: Other surviving ranks did not call within `limit_s` seconds.
            PeerLostError: This rank is lost itself.
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
                    f"rank {rank} has waited for rank {', '.join(map(str, missing))} to go on without the lost ranks: "
                    f"gave up after timeout_s = {limit_s:g}"
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
        """Pass this hub's losses and revocation on to `hub`, a hub of `ranks`."""
        for number, rank in enumerate(ranks):
            if rank in self._lost:
                hub.lose(number, self._lost[rank])
        if self._is_revoked:
            hub.revoke()


class _Sent:
    """A message between threads; sending copies it at once."""

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
    """Message queues between the threads of one process."""

    def __init__(self, hub: ThreadHub, rank: int, channel: int) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._channel = channel

    @override
    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        self._hub.before_send(self.rank, to)
        if why := self._hub.why_lost(self.rank):
            raise PeerLostError(why)
        self._hub.queue_for(self._channel, self.rank, to, lane).put(data.copy())
        return _Sent()

    @override
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        messages = self._hub.queue_for(self._channel, source, self.rank, lane)
        return _Receive(messages, into)


def connect(settings: Settings, hub: ThreadHub, rank: int, instances: Sequence[int] | None = None) -> Communicator:
    """Join the group that meets at `hub` as `rank`; return when all ranks have joined.

    The default mechanism is the ring. The mechanism "window" reduces in shared memory, as processes of one host do.
    """
    settings = replace(settings, spins=0)  # a spinning thread would hold the interpreter lock that others need
    members = instances if instances is not None else range(hub.size)
    group = RankGroup(rank, [f"rank {number}" for number in range(hub.size)], members, partial(hub.why_not_wait, rank))

    def make_subgroup(ranks: Sequence[int]) -> Communicator:
        of_ranks = hub.subgroup(tuple(ranks), rank)
        return connect(settings, of_ranks, ranks.index(rank), [members[number] for number in ranks])

    links = (ThreadLink(hub, rank, 0), ThreadLink(hub, rank, 1))
    share_memory = settings.mechanism == "window"
    for link in links:
        link.hosts = host_numbers(hub.hosts) or (0,) * hub.size * share_memory
    communicator = assemble(settings, group, links, share_memory, make_subgroup)
    communicator.beside = ThreadLink(hub, rank, 2)
    return communicator


def connect_survivors(settings: Settings, hub: ThreadHub, rank: int) -> Communicator:
    """Connect the surviving ranks of a group; all of them call this, and again after another loss.

    Earlier connections can no longer be used. This is `connect_survivors` of the MPI backend for threads.

    Args:
        settings: Options, as for `connect`.
        hub: Hub at which the whole group first met.
        rank: This rank's number in `hub`.

    Raises:
        CollectiveTimeoutError: A surviving rank did not come within `timeout_s`.
        PeerLostError: This rank is lost itself, or ranks were lost faster than the survivors could connect.
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
            logger.info("another rank was lost while the survivors reconnected: %s", error)
    raise PeerLostError("the surviving ranks could not reconnect, because more ranks were lost each time")


def run_on_threads(
    size: int,
    function: Callable[[Communicator], Result],
    settings: Settings | None = None,
    hosts: Sequence[Hashable] = (),
) -> list[Result]:
    """Run `function(communicator)` once per rank, each in its own thread; return the results in rank order.

    If a rank raises, the waits of the others end with `PeerLostError`, and this function raises the first exception.

    Args:
        size: Number of ranks.
        function: Program of a rank; its communicator is closed when it returns.
        settings: Limits and mechanism of the communicators.
        hosts: Name of each rank's host, as for `ThreadHub`.

    Example:
        >>> import numpy as np
        >>> run_on_threads(2, lambda communicator: communicator.all_reduce(np.ones(2)).tolist())
        [[2.0, 2.0], [2.0, 2.0]]
    """
    hub = ThreadHub(size, hosts=hosts)
    errors: list[BaseException] = []  # in order of time; all but the first may be consequences

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
