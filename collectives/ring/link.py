"""A link: what the ring needs from a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from collectives.reduction import Reduction

CHUNK_BYTES = 1 << 18
LANES = 3
"""What a channel has between two ranks, numbered from 0."""


@dataclass(frozen=True)
class Sizes:
    """How arrays are best cut for a link; the same on all ranks.

    Attributes:
        inline_bytes: how much each rank may send to every other one along with an exchange.
        short_bytes: up to this size of the partial sums slices are sent to the rank that reduces them.
        direct_bytes: up to this size they are, in one message each, as long as no host sends more than in the ring;
            those of 16-bit floats beyond it as well.
        sharing: how many ranks send through the same wire.
        chunk_bytes: the largest message in the pipelined passes.
        smallest_chunk_bytes: and the smallest, but for what is left at the end.
        chunks_at_least: into how many messages arrays are cut that allow it; between filling the ring and emptying it
            several of them are under way at each rank.
    """

    inline_bytes: int = 1 << 16
    short_bytes: int = 0
    direct_bytes: int = 1 << 21
    sharing: int = 1
    chunk_bytes: int = CHUNK_BYTES
    smallest_chunk_bytes: int = CHUNK_BYTES
    chunks_at_least: int = 16

    def chunk_of(self, nbytes: int) -> int:
        """The size of the messages in which so many bytes go through the ring."""
        return min(self.chunk_bytes, max(self.smallest_chunk_bytes, nbytes // self.chunks_at_least))

    def goes_directly(self, size: int, reduction: Reduction, counts: Sequence[int]) -> bool:
        """Whether slices of contributions are sent to the rank that reduces them, instead of partial sums in a ring.

        Args:
            size: the elements of the array.
            reduction: the arithmetic.
            counts: how many arrays each rank contributes.
        """
        ranks = len(counts)
        nbytes = size * reduction.accumulator.itemsize
        if nbytes <= self.short_bytes:
            return True
        slices = self.sharing * (max(counts) + 1) * (ranks - self.sharing)  # sent by a host
        if reduction.is_direct:
            return nbytes <= self.direct_bytes and slices <= 2 * ranks
        # Partial sums are wider than contributions and results. The host that sends most sends both in the ring, but
        # for two ranks, of which one sends partial sums and the other one results.
        in_ring = reduction.accumulator.itemsize + (reduction.dtype.itemsize if ranks > 2 else 0)
        return slices * reduction.dtype.itemsize <= ranks * in_ring

    def scatters_directly(self, reduction: Reduction, counts: Sequence[int]) -> bool:
        """The same for a reduction of which each rank receives its slice only: whether this moves no more bytes."""
        ranks = len(counts)
        slices = self.sharing * max(counts) * (ranks - self.sharing)  # sent by a host; of partial sums it sends all
        return slices * reduction.dtype.itemsize <= ranks * reduction.accumulator.itemsize


class Transfer(Protocol):
    """A message on its way.

    Attributes:
        received: how many bytes came, once it is done; None where the network itself sees to it that all of them do.
    """

    @property
    def received(self) -> int | None:
        """See above."""

    def done(self) -> bool:
        """Whether it has arrived, or its buffer may be used again; asking also drives the transfer on.

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


class Link(ABC):
    """Connects one rank with all the others; messages keep their order within a lane between two ranks.

    Lanes are small numbers that both sides agree on. Buffers are contiguous, one-dimensional and of dtype uint8;
    they belong to the link until the transfer is done.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        sizes: how arrays are best cut.
        pause: returns when a transfer may have ended, at the latest after the given seconds; None where the link
            cannot tell.
    """

    rank: int
    size: int
    sizes: Sizes = Sizes()
    pause: Callable[[float], None] | None = None

    @abstractmethod
    def send(self, data: np.ndarray, to: int, lane: int) -> Transfer:
        """Begin to send `data`; never waits for the receiver."""

    @abstractmethod
    def receive(self, into: np.ndarray, source: int, lane: int) -> Transfer:
        """Begin to receive the next message of `source` into the beginning of `into`, which is large enough."""

    def fetch(self, room: np.ndarray, source: int, lane: int) -> Fetch:
        """Begin to receive the next message of `source` to be read only: into `room`, or wherever the link has it."""
        return FetchedInto(self.receive(room, source, lane), room)

    def close(self) -> None:  # noqa: B027 - most links hold nothing
        """Give back what the link holds; never waits for other ranks."""
