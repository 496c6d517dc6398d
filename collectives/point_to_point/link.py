"""A link: what plans need from a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from collectives.plans.network import Network

CHUNK_BYTES = 1 << 18
LANES = 3
EXCHANGE, PARTIALS, RESULTS = range(LANES)
"""What a channel has between two ranks."""
USUAL_COSTS = Network(
    latency_s=50e-6,
    message_s=20e-6,
    bytes_per_s=1e9,
    local_latency_s=50e-6,
    local_message_s=20e-6,
    local_bytes_per_s=1e9,
    memory_bytes_per_s=5e9,
)
"""Where nobody has measured any."""


@dataclass(frozen=True)
class Sizes:
    """The sizes into which arrays are best cut for a link; the same on all ranks.

    Attributes:
        inline_bytes: how much each rank may send to every other one along with an exchange.
        whole_bytes: up to this size arrays go through a plan in one piece.
        chunk_bytes: the largest message where they go in several.
        smallest_chunk_bytes: and the smallest, but for what is left at the end.
        pieces_at_least: into how many pieces arrays are cut that allow it; several are under way at each rank.
        opening_bytes: how much of the first messages of a plan goes to another host along with an exchange, at most.
        one_column_bytes: up to this size one rank of each host sends and receives for all, if it has them nearby.
    """

    inline_bytes: int = 1 << 16
    whole_bytes: int = 1 << 21
    chunk_bytes: int = CHUNK_BYTES
    smallest_chunk_bytes: int = CHUNK_BYTES
    pieces_at_least: int = 16
    opening_bytes: int = 60 << 10
    one_column_bytes: int = 1 << 18

    @property
    def longest_message_bytes(self) -> int:
        """The bytes that surely travel at once, as where two ranks exchange an array in one piece."""
        return max(self.chunk_bytes, self.whole_bytes // 2)

    def chunk_of(self, nbytes: int) -> int:
        """Return the size of the messages in which so many bytes travel."""
        return min(self.chunk_bytes, max(self.smallest_chunk_bytes, nbytes // self.pieces_at_least))


class Transfer(Protocol):
    """A message on its way.

    Attributes:
        received: how many bytes came, once it is done; None where the network itself sees to it that all of them do.
    """

    @property
    def received(self) -> int | None:
        """The number of bytes that came, or None."""

    def done(self) -> bool:
        """Return whether it has arrived, or its buffer may be used again; asking also drives the transfer on.

        Raises:
            PeerLostError: where the other rank is gone.
        """


class Fetch(Transfer, Protocol):
    """A message on its way, for a receiver who does not mind where it lies."""

    @property
    def message(self) -> np.ndarray:
        """It, of dtype uint8, once it has arrived."""


class FetchedInto:
    """A message that is received into `room`."""

    __slots__ = ("done", "message")
    received = None

    def __init__(self, transfer: Transfer, room: np.ndarray) -> None:
        self.done = transfer.done
        self.message = room


Pause = Callable[[float], None]
"""Returns when something may have happened, at the latest after so many seconds."""


class Link(ABC):
    """Connects one rank with all the others; messages keep their order within a lane between two ranks.

    Lanes are small numbers that both sides agree on. Buffers are contiguous, one-dimensional and of dtype uint8;
    they belong to the link until the transfer is done.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        hosts: the number of the host of each rank, from 0 on; nothing where every rank counts as a host.
        nearby: the same, where ranks of a host reach each other much sooner than those of others.
        sizes: how arrays are best cut.
        costs: what messages and sums cost, for the choice among plans; the same on all ranks.
        are_costs_measured: whether they are those of this network; else some plans are not considered.
        pause: returns when a transfer may have ended; None where the link cannot tell.
    """

    rank: int
    size: int
    hosts: tuple[int, ...] = ()
    nearby: tuple[int, ...] = ()
    sizes: Sizes = Sizes()
    costs: Network = USUAL_COSTS
    are_costs_measured: bool = False
    pause: Pause | None = None

    @abstractmethod
    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        """Begin to send `data`; never waits for the receiver."""

    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        """Begin to send `data` to several ranks; a transfer for each of them."""
        return [self.send(data, each, lane) for each in to]

    @abstractmethod
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        """Begin to receive the next message of `source` into the beginning of `into`, which is large enough."""

    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        """Begin to receive the next message of `source` to be read only: into `room`, or wherever the link has it."""
        return FetchedInto(self.receive(room, source, lane), room)

    def pausing(self) -> Pause | None:
        """Return how a wait that begins now pauses: `pause`, where the link can tell of all that is under way."""
        return self.pause

    def close(self) -> None:  # noqa: B027 - most links hold nothing
        """Give back what the link holds; never waits for other ranks."""
