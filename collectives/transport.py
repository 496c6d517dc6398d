"""The interface of transports: an exchange of small messages, then the collective operations on large arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from collectives.calls import Call
from collectives.reduction import Reduction

Bytes = np.ndarray  # one-dimensional, contiguous, dtype uint8
Contributions = Sequence[np.ndarray]  # the arrays of one rank; one array for each local replica


@dataclass(frozen=True)
class Parts:
    """The contributions of all ranks to an exchange.

    Attributes:
        counts: Number of arrays that each rank contributes, one per local replica.
        arrays: Contributed arrays of all ranks in rank order, valid until the next exchange. Empty if they were too
            large to travel with the exchange.
    """

    counts: tuple[int, ...]
    arrays: Sequence[np.ndarray]

    @property
    def total(self) -> int:
        """The number of arrays that all ranks contribute together."""
        return sum(self.counts)


class Reducing(NamedTuple):
    """A reduction to be carried out.

    Attributes:
        contributions: Arrays of this rank.
        out: Array for the result; not written until all calls are known to be equal.
        reduction: Arithmetic of the reduction.
        scatters: Whether every rank keeps only its own block, one of `size` equal blocks.
        is_shared: Whether `out` is memory that `allocate` returned on all ranks.
    """

    contributions: Contributions
    out: np.ndarray
    reduction: Reduction
    scatters: bool = False
    is_shared: bool = False


class Prepared(Protocol):
    """A reduction that can be repeated with other arrays of the same layout.

    Attributes:
        call: Call that all ranks must make.
        take: Function that holds the arrays of a call and returns True; it returns False if the call was not prepared.
        drop: Function that releases the arrays of a call that will not be carried out.
        is_of_use: Whether the ranks still contribute as many arrays as they did when the call was prepared.
    """

    call: Call
    take: Callable[[Sequence[np.ndarray], np.ndarray], bool]
    drop: Callable[[], None]
    is_of_use: bool

    def is_apart(self, group: Sequence[Prepared]) -> bool:
        """Return whether the result shares no memory with the arrays that other members of the group have taken."""

    def carry_out(self, transport: Transport, moves: Callable[[int], None] | None = None) -> None:
        """Carry out the call whose arrays were taken; see `Request.carry_out`."""


class Transport(ABC):
    """The movement of bytes between the ranks of one communicator.

    One thread at a time calls it. All arrays are one-dimensional and contiguous. Every collective begins with
    `exchange`, by which each rank sees the calls of all ranks and receives small arrays. If all calls are equal, one of
    the other methods may follow, on all ranks the same one. After an error the ranks may be out of step: only `close`
    may follow.
    """

    rank: int
    size: int
    shares_memory: bool = False
    """Whether `allocate` returns the same memory on all ranks."""
    window_bytes: int = 0
    """Size of other memory that the ranks share."""
    groups_reductions: bool = False
    """Whether one `reduce_group` costs less than a `reduce` per member."""
    opens_reductions: bool = False
    """Whether `announce` saves time."""
    scatters_reductions: bool = True
    """Whether a reduce-scatter costs less than a whole all-reduce and has the same bits."""
    prepares_reductions: bool = False
    """Whether `prepared` may return something."""

    @abstractmethod
    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        """Send `fingerprint`, `count` and `arrays` to all ranks, and receive theirs.

        Args:
            fingerprint: 64-bit hash of the call.
            arrays: Arrays of one dtype and size that may travel with the exchange; large arrays are not sent.
            count: Number of arrays that this rank contributes, or another number for the other ranks.

        Returns:
            Whether all fingerprints are equal, and the contributions of all ranks. The arrays are empty if fingerprints
            differ or the arrays of any rank were too large.
        """

    def prepared(self, call: Call, reducing: Reducing, out: np.ndarray) -> Prepared | None:
        """Prepare repetitions of the reduction into `out` that has just been carried out; None: they are not faster.

        If `out` is shared memory, repetitions have the same `out`; else they have any private arrays of its layout.

        A rank may prepare a reduction that another rank carries out as before.
        """
        return None

    def announce(self, reducing: Reducing) -> None:  # noqa: B027
        """Announce the reduction that follows if the next exchange finds equal calls and brings no arrays.

        In that case `reduce` of the same `reducing` follows, or nothing.
        """

    @abstractmethod
    def reduce(self, reducing: Reducing, parts: Parts) -> None:
        """Combine all contributions of all ranks in the order of the tree.

        Every rank gets the whole result in `out`; if `reducing.scatters`, only its own block. If `reducing.is_shared`,
        `out` is the same memory on all ranks. `out` may be the first contribution.
        """

    def reduce_group(self, group: Sequence[Reducing], parts: Parts) -> None:
        """Carry out several reductions that all ranks have agreed on together.

        None of them scatters or has a shared `out`.
        """
        for reducing in group:
            self.reduce(reducing, parts)

    @abstractmethod
    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Copy `buffer` of rank `root` into `buffer` of all other ranks."""

    @abstractmethod
    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        """Copy the `block` of every rank into row `rank` of `out`, of shape (size, block.size)."""

    def gather(self, block: np.ndarray, out: np.ndarray | None, root: int) -> None:
        """Gather the blocks on rank `root` only; other ranks pass `out=None` and need not receive anything."""
        self.all_gather(block, np.empty((self.size, block.size), np.uint8) if out is None else out)

    def shift(self, block: np.ndarray, out: np.ndarray, distance: int) -> None:
        """Copy the `block` of the rank that is `distance` ranks further, around the ring, into `out`."""
        rows = np.empty((self.size, block.size), np.uint8)
        self.all_gather(block, rows)
        np.copyto(out, rows[(self.rank + distance) % self.size])

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of each rank's host; the same for all ranks if it is not known."""
        return (0,) * self.size

    @abstractmethod
    def allocate(self, nbytes: int) -> np.ndarray:
        """Allocate memory for results, as bytes; all ranks call it with the same size.

        If the ranks share memory, all of them get the same memory, and `reduce` writes a result into it only once.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources without waiting for other ranks."""
