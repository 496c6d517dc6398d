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
    """The identity of a worker, the others, and how far they have got; `Node` is the whole of it.

    Args:
        addresses: of all workers, in rank order.
        names: what they are called in messages.
        rank: this one's.
        description: what else all workers have to agree on.
        security: how they know each other.
        limits: how long to wait for them, and by what clock.

    Attributes:
        clock: what its limits are measured with.
        peers: the others, by their ranks.
        changed: held while what is known of them changes, and notified then.
        channels: those that this worker uses.
        is_met: whether all have met.
        is_leaving: set when this worker leaves.
        loss: why the group cannot go on; "" while it can.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        names: Sequence[str],
        rank: int,
        description: str,
        security: Security,
        limits: Limits,
    ) -> None:
        self.rank = rank
        self.names = names
        self.address = addresses[rank]
        self.security = security
        self.limits = limits
        self.clock = limits.clock
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
        self.loss = ""

    @abstractmethod
    def begin_control(self, peer: Peer) -> grpc.Future:
        """Tell another worker that this one is there, from now on again and again."""

    @abstractmethod
    def take_answer(self, peer: Peer, digest: str, control: grpc.Future) -> None:
        """Note that the worker at the address of `peer` has welcomed this one; another one may have used its name."""

    @abstractmethod
    def watch_control(self, peer: Peer) -> None:
        """Notice when the stream that tells another worker of this one breaks."""

    @abstractmethod
    def lose(self, peer: Peer, why: str) -> None:
        """Note that a worker is gone, or does what no worker does."""
