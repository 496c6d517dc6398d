"""The interface of a link: the messages that plans need from a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol, final

import numpy as np

from collectives.plans.network import Network

CHUNK_BYTES = 1 << 18
LANES = 3
EXCHANGE, PARTIALS, RESULTS = range(LANES)
"""The lanes of a channel between two ranks: exchanges, partial sums, results."""
USUAL_COSTS = Network(
    latency_s=50e-6,
    message_s=20e-6,
    bytes_per_s=1e9,
    local_latency_s=50e-6,
    local_message_s=20e-6,
    local_bytes_per_s=1e9,
    memory_bytes_per_s=5e9,
)
"""Assumed costs for networks without measured costs."""


@dataclass(frozen=True)
class Sizes:
    """The best sizes of messages for a link; the same on all ranks.

    Attributes:
        inline_bytes: Limit of the arrays that each rank sends along with an exchange.
        whole_bytes: Largest array that goes through a plan in one piece.
        chunk_bytes: Largest message of an array in several pieces.
        smallest_chunk_bytes: Smallest message of an array in several pieces, except for the last one.
        pieces_at_least: Minimum number of pieces of arrays that are large enough; a rank has several in progress.
        opening_bytes: Limit of a plan's first messages to another host that travel with an exchange.
        gathered_bytes: Limit of the sums of a rank that travel to all others with an exchange; at most `opening_bytes`.
        one_column_bytes: Largest array for one column, i.e. one rank per host sends and receives for its host. Only for
            links with `nearby` ranks.
    """

    inline_bytes: int = 1 << 16
    whole_bytes: int = 1 << 21
    chunk_bytes: int = CHUNK_BYTES
    smallest_chunk_bytes: int = CHUNK_BYTES
    pieces_at_least: int = 16
    opening_bytes: int = 60 << 10
    gathered_bytes: int = 0
    one_column_bytes: int = 1 << 18

    @property
    def longest_message_bytes(self) -> int:
        """The largest message that a link always takes at once, e.g. if two ranks exchange an array in one piece."""
        return max(self.chunk_bytes, self.whole_bytes // 2)

    def chunk_of(self, nbytes: int) -> int:
        """Return the message size for an array of `nbytes` bytes."""
        return min(self.chunk_bytes, max(self.smallest_chunk_bytes, nbytes // self.pieces_at_least))


class Transfer(Protocol):
    """A message in transit.

    Attributes:
        received: Number of bytes received, once the transfer is done; None if the network guarantees completeness.
    """

    @property
    def received(self) -> int | None:
        """The number of bytes received, or None."""

    def done(self) -> bool:
        """Return whether the message has arrived, or its buffer may be reused. The call also drives the transfer.

        Once true, the answer stays true.

        Raises:
            PeerLostError: The other rank is gone.
        """


class Fetch(Transfer, Protocol):
    """A message in transit whose receiver accepts it in any memory."""

    @property
    def message(self) -> np.ndarray:
        """The message, of dtype uint8, after it has arrived."""


class FetchedInto:
    """A message that is received into `room`."""

    __slots__ = ("_transfer", "done", "message")

    def __init__(self, transfer: Transfer, room: np.ndarray) -> None:
        self._transfer = transfer
        self.done = transfer.done
        self.message = room

    @property
    def received(self) -> int | None:
        """The number of bytes received, or None."""
        return self._transfer.received


Pause = Callable[[float], None]
"""Function that returns when something may have happened, at the latest after the given seconds."""


class Mailbox(Protocol):
    """The received messages of one lane from one rank, in order."""

    def __len__(self) -> int:
        """Return the number of messages that have not been taken."""

    def take(self) -> bytes | None:
        """Return the next message, or None if none has arrived."""

    def put_back(self, message: bytes) -> None:
        """Let a message that was taken be the next one again."""


class Mail(NamedTuple):
    """The messages of one lane with several ranks, as `bytes` and without transfers.

    Attributes:
        puts: For each rank the function that sends a message to it.
        boxes: Messages of each rank.
        pause: Function that returns when a message may have arrived.
    """

    puts: Sequence[Callable[[bytes], None]]
    boxes: Sequence[Mailbox]
    pause: Pause


class Link(ABC):
    """A connection of one rank with all other ranks.

    Between two ranks, messages on the same lane keep their order. Lanes are small numbers on which both sides agree.
    Buffers are contiguous, one-dimensional and of dtype uint8. A buffer belongs to the link until its transfer is done.
    No method waits for other ranks. After a `PeerLostError` the caller only calls `close`.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        hosts: Host number of each rank, from 0; empty if every rank counts as a host of its own.
        nearby: The same as `hosts`, if ranks of one host reach each other much faster than ranks of others; else empty.
        sizes: Best sizes of messages.
        costs: Costs of messages and sums for the choice among plans; the same on all ranks.
        are_costs_measured: Whether `costs` were measured on this network; otherwise some plans are not considered.
        pause: Function that returns when a transfer may have ended; None if the link cannot notify.
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
        """Start to send `data`, without waiting for the receiver."""

    def send_all(self, data: np.ndarray, to: Sequence[int], lane: int) -> list[Transfer]:
        """Start to send `data` to several ranks; return one transfer per rank."""
        return [self.send(data, each, lane) for each in to]

    def send_joined(self, parts: Sequence[np.ndarray], to: int, lane: int) -> Sequence[Transfer]:
        """Start to send arrays of any dtype as one message; return the transfers to wait for, if any."""
        return [self.send(np.concatenate([part.view(np.uint8) for part in parts]), to, lane)]

    @abstractmethod
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        """Start to receive the next message of `source` into the beginning of `into`, which must be large enough."""

    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        """Start to receive the next message of `source` for reading only: into `room`, or into memory of the link."""
        return FetchedInto(self.receive(room, source, lane), room)

    def fetch_up_to(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        """Fetch as `fetch` does a message of at most `room.size` bytes; what follows it in its memory is undefined."""
        return FetchedInto(self.receive(room, source, lane), room)

    def mail(self, ranks: Sequence[int], lane: int) -> Mail | None:
        """Return the messages with some ranks, if the link has them as `bytes`; else None."""
        return None

    def pausing(self) -> Pause | None:
        """Return the pause function for a wait that begins now: `pause` if it covers all pending transfers."""
        return self.pause

    def end(self, is_complete: bool) -> None:  # noqa: B027 - most links tell nobody
        """Note the end of the last collective; `close` follows.

        Args:
            is_complete: Whether all ranks have closed. Otherwise this rank may connect with the survivors again.
        """

    def close(self) -> None:  # noqa: B027 - most links hold nothing
        """Release the resources of the link, without waiting for other ranks."""


@final
class RefusingLink(Link):
    """A link that can only be looked at, in place of a link that this process must not use.

    Args:
        link: Link that must not be used.
        error: Reason, which is raised instead.
    """

    def __init__(self, link: Link, error: Exception) -> None:
        self.rank, self.size = link.rank, link.size
        self.hosts, self.nearby, self.sizes = link.hosts, link.nearby, link.sizes
        self._error = error

    def send(self, data: np.ndarray, to: int, lane: int) -> NoReturn:
        """Refuse to send."""
        raise self._error

    def receive(self, into: np.ndarray, source: int, lane: int) -> NoReturn:
        """Refuse to receive."""
        raise self._error
