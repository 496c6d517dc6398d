"""The backend within one process: every rank is a thread. For tests, debugging and notebooks."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

import numpy as np

from collectives.assembly import Group, Settings, assemble
from collectives.communicator import Communicator
from collectives.errors import PeerLostError
from collectives.link import Link, Transfer

Result = TypeVar("Result")


class ThreadHub:
    """Where the threads of one group meet.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a group of {size} ranks; it needs at least one")
        self.size = size
        self.lost: str = ""
        self._lock = threading.Lock()
        self._queues: defaultdict[tuple[int, int, int, int], queue.SimpleQueue[np.ndarray]] = defaultdict(
            queue.SimpleQueue
        )
        self._subgroups: dict[tuple[tuple[int, ...], int], ThreadHub] = {}
        self._joined: defaultdict[tuple[tuple[int, ...], int], int] = defaultdict(int)

    def queue_for(self, channel: int, source: int, to: int, lane: int) -> queue.SimpleQueue[np.ndarray]:
        """The messages of one lane from one rank to another."""
        with self._lock:
            return self._queues[channel, source, to, lane]

    def subgroup(self, ranks: tuple[int, ...], rank: int) -> ThreadHub:
        """The hub of some of the ranks; each call of a rank with the same ranks gets the next such group."""
        with self._lock:
            turn = self._joined[ranks, rank]
            self._joined[ranks, rank] += 1
            return self._subgroups.setdefault((ranks, turn), ThreadHub(len(ranks)))


class _Sent:
    """Messages between threads are copied at once."""

    received = None

    def done(self) -> bool:
        return True


class _Receive:
    received = None

    def __init__(self, messages: queue.SimpleQueue[np.ndarray], into: np.ndarray) -> None:
        self._messages = messages
        self._into = into
        self._is_done = False

    def done(self) -> bool:
        if not self._is_done:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return False
            self._into[: message.size] = message
            self._is_done = True
        return self._is_done


class ThreadLink(Link):
    """Queues between the threads of one process."""

    def __init__(self, hub: ThreadHub, rank: int, channel: int) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._channel = channel

    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
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
    group = Group(rank, [f"rank {number}" for number in range(hub.size)], members, lambda awaited: hub.lost)

    def make_subgroup(ranks: Sequence[int]) -> Communicator:
        of_ranks = hub.subgroup(tuple(ranks), rank)
        return connect(settings, of_ranks, ranks.index(rank), [members[number] for number in ranks])

    links = (ThreadLink(hub, rank, 0), ThreadLink(hub, rank, 1))
    return assemble(settings, group, links, settings.mechanism == "window", make_subgroup)


def run_on_threads(
    size: int, function: Callable[[Communicator], Result], settings: Settings | None = None
) -> list[Result]:
    """Run `function(communicator)` once per rank, each in a thread of its own; the results in rank order.

    When one rank raises, waits of the others end with `PeerLostError`, and the first exception is raised here.

    Args:
        size: the number of ranks.
        function: the program; its communicator is closed when it returns.
        settings: limits and mechanism of the communicators.
    """
    hub = ThreadHub(size)

    def run(rank: int) -> Result:
        try:
            with connect(settings or Settings(), hub, rank) as communicator:
                return function(communicator)
        except BaseException as error:
            hub.lost = hub.lost or f"rank {rank} has failed: {type(error).__name__}: {error}"
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future.done() and future.exception()]
        own = [future for future in failed if not isinstance(future.exception(), PeerLostError)]
        for future in own or failed:
            future.result()
        return [future.result() for future in futures]
