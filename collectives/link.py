"""A link: what the ring needs from a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np

CHUNK_BYTES = 1 << 18
DIRECT_BYTES = 1 << 21


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
        chunk_bytes: the size in which long arrays are best sent.
        direct_bytes: up to which size of the partial sums slices are better sent to the rank that reduces them.
        pause: returns when a transfer may have ended, at the latest after the given seconds; None where the link
            cannot tell.
    """

    rank: int
    size: int
    chunk_bytes: int = CHUNK_BYTES
    direct_bytes: int = DIRECT_BYTES
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
