"""The interface between a worker and its parts."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import grpc

from collectives.network.addresses import Address
from collectives.network.hello import digest_cluster
from collectives.network.identity import this_runner
from collectives.network.peer import Peer
from collectives.network.security import Security
from collectives.waiting import Limits


class Worker(ABC):
    """The identity and state of a worker, as its parts see it; `Node` is the implementation.

    Args:
        addresses: Addresses of all workers in rank order.
        names: Names of all workers in messages.
        rank: Rank of this worker.
        description: Further facts on which all workers must agree.
        security: Certificates and token.
        limits: Limits of waits, with their clock.
        shrinks: Whether the others go on if a worker is lost.

    Attributes:
        clock: Clock of the limits.
        peers: Other workers by rank.
        changed: Condition that guards the state of peers and is notified of changes.
        channels: Channels that this worker uses.
        is_met: Whether all workers have met.
        is_leaving: Event that is set when this worker leaves.
        losses: For each lost worker a sentence with the reason, in the order in which they were lost.
        epoch: Number of the membership on which the workers have agreed last; 0 while this worker waits to join. So
            it refuses no stream of a worker that has not heard of a later one yet.
        survived: Lost workers without which the others have gone on.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        names: Sequence[str],
        rank: int,
        description: str,
        security: Security,
        limits: Limits,
        shrinks: bool = False,
    ) -> None:
        self.rank = rank
        self.names = names
        self.address = addresses[rank]
        self.security = security
        self.limits = limits
        self.clock = limits.clock
        self.shrinks = shrinks
        self.runner = this_runner()
        self.cluster = digest_cluster([address.text for address in addresses], description)
        self.description = f"{', '.join(address.text for address in addresses)}{description and '; '}{description}"
        self.peers = {
            other: Peer(other, names[other], address, self.clock)
            for other, address in enumerate(addresses)
            if other != rank
        }
        self.changed = threading.Condition()
        self.channels: set[str] = set()
        self.is_met = False
        self.is_leaving = threading.Event()
        self.losses: dict[int, str] = {}  # replaced and never changed, so that it can be read without the lock
        self.epoch = 0
        self.survived: frozenset[int] = frozenset()

    @property
    def loss(self) -> str:
        """The reason why the present members cannot continue; "" while they can."""
        return next((why for rank, why in self.losses.items() if rank not in self.survived), "")

    @abstractmethod
    def begin_control(self, peer: Peer) -> grpc.Future:
        """Open the control stream to another worker, which sends beats from now on."""

    @abstractmethod
    def call(self, peer: Peer) -> None:
        """Call another worker in a thread until it answers or is gone; if it was lost, as a new process."""

    @abstractmethod
    def seat(self, rank: int) -> Peer:
        """Return the other worker with this rank; a new one if its process was lost and has been started again.

        Raises:
            Refusal: It was lost, and its place is not free, or not yet.
        """

    @property
    @abstractmethod
    def awaited(self) -> list[Peer]:
        """The workers that this one has to meet before it can work."""

    @abstractmethod
    def take_view(self, view: str) -> None:
        """Note the view of a worker that works already, so that this one has to join."""

    @abstractmethod
    def take_answer(self, peer: Peer, digest: str, control: grpc.Future) -> None:
        """Note the welcome of the worker at the address of `peer`; send away a different process with its name."""

    @abstractmethod
    def watch_control(self, peer: Peer) -> None:
        """Detect the end of the control stream to another worker."""

    @abstractmethod
    def lose(self, peer: Peer, why: str) -> None:
        """Note that a worker is lost or violates the protocol."""

    @abstractmethod
    def tell_change(self) -> None:
        """Let all waits look again, and tell the other workers the view of this one."""
