"""The interface of a backend: the exchange of small messages, and the large collectives behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from collectives.reduction import Reduction

Bytes = np.ndarray  # one-dimensional, contiguous, dtype uint8
Contributions = Sequence[np.ndarray]  # of one rank: an array for each local replica


@dataclass(frozen=True)
class Parts:
    """The contributions of every rank to an exchange.

    Attributes:
        counts: the number of arrays that each rank contributes (its local replicas).
        arrays: the contributed arrays of all ranks in rank order, valid until the next exchange;
            empty where they were too large to travel with the exchange.
    """

    counts: tuple[int, ...]
    arrays: Sequence[np.ndarray]

    @property
    def total(self) -> int:
        """The number of arrays that all ranks contribute together."""
        return sum(self.counts)


class Reducing(NamedTuple):
    """A reduction.

    Attributes:
        contributions: of this rank.
        out: what receives the result; not touched before all calls are known to be equal.
        reduction: the arithmetic.
        scatters: whether every rank keeps its one of `size` equal blocks.
        is_shared: whether `out` is what `allocate` returned on all ranks.
    """

    contributions: Contributions
    out: np.ndarray
    reduction: Reduction
    scatters: bool = False
    is_shared: bool = False


class Transport(ABC):
    """Moves bytes between the ranks of one communicator; one call at a time, by one thread at a time.

    Every collective begins with `exchange`, in which all ranks see what all the others ask for, and only when
    everybody asks for the same thing does one of the other methods follow. Small arrays travel with the exchange.
    All arrays are one-dimensional and contiguous. After an error the ranks may be out of step: do not go on.
    """

    rank: int
    size: int
    shares_memory: bool = False
    """Whether `allocate` returns the same memory on all ranks."""
    window_bytes: int = 0
    """How much other memory the ranks have in common."""
    groups_reductions: bool = False
    """Whether `reduce_group` costs less than `reduce` for each of the group."""
    opens_reductions: bool = False
    """Whether `announce` saves time."""
    scatters_reductions: bool = True
    """Whether to scatter costs less than to give all ranks everything, with the same bits."""

    @abstractmethod
    def exchange(self, fingerprint: int, arrays: Sequence[np.ndarray], count: int) -> tuple[bool, Parts]:
        """Show all ranks `fingerprint`, `count` and `arrays`; see theirs.

        Args:
            fingerprint: 64 bits that stand for the call.
            arrays: what may travel along, all of one dtype and size; the transport leaves large ones at home.
            count: the number of arrays that this rank contributes, or any other number to tell the others.

        Returns:
            Whether all fingerprints are equal, and what all ranks contributed. Without equal fingerprints, or where
            one rank's arrays were too large, `arrays` is empty.
        """

    def stage(self, contributions: Contributions, reduction: Reduction) -> None:  # noqa: B027
        """Begin to move contributions before the exchange, where that saves time.

        After an exchange without arrays, `reduce` of the same contributions into shared memory follows, or nothing.
        """

    def announce(self, reducing: Reducing) -> None:  # noqa: B027
        """Announce what is reduced if the next exchange finds all calls equal and brings no arrays.

        `reduce` of the same follows then, or nothing.
        """

    @abstractmethod
    def reduce(self, reducing: Reducing, parts: Parts) -> None:
        """Combine all contributions of all ranks, in the order of the tree.

        Every rank gets the whole result in `out`; if `reducing.scatters`, only its own block. If `reducing.is_shared`,
        `out` is the same memory on all ranks and `stage` came before. `out` may be the first of the contributions.
        """

    def reduce_group(self, group: Sequence[Reducing], parts: Parts) -> None:
        """`reduce` for several reductions that all ranks have agreed on together.

        None of them scatters or is shared.
        """
        for reducing in group:
            self.reduce(reducing, parts)

    @abstractmethod
    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Copy the bytes of `buffer` of rank `root` into `buffer` of all the other ranks."""

    @abstractmethod
    def all_gather(self, block: np.ndarray, out: np.ndarray) -> None:
        """Put the `block` of every rank into row `rank` of `out`, of shape (size, block.size)."""

    def gather(self, block: np.ndarray, out: np.ndarray | None, root: int) -> None:
        """`all_gather` for rank `root` alone: the others, which need not receive anything, give no `out`."""
        self.all_gather(block, np.empty((self.size, block.size), np.uint8) if out is None else out)

    @abstractmethod
    def allocate(self, nbytes: int) -> np.ndarray:
        """Return memory for results, as bytes; all ranks call it with the same size.

        Where ranks share memory this is one array for all of them, which `reduce` then writes only once.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds; never waits for other ranks."""
