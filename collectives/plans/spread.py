"""The spread of replicas over ranks and hosts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from collectives.tree import TreeNode, subtrees


@dataclass(frozen=True)
class Spread:
    """The spread of replicas over ranks: contiguous blocks in rank order.

    Attributes:
        counts: Number of replicas of each rank.
        hosts: Host number of each rank; hosts are numbered from 0.

    Raises:
        ValueError: A rank has no replicas or no host, or a host has no ranks.
    """

    counts: tuple[int, ...]
    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"ranks have {list(self.counts)} replicas; each needs at least one")
        if len(self.hosts) != len(self.counts) or set(self.hosts) != set(range(max(self.hosts) + 1)):
            raise ValueError(
                f"{len(self.counts)} ranks are on hosts {list(self.hosts)}; give one host per rank, numbered from 0"
            )

    @classmethod
    def apart(cls, counts: Sequence[int]) -> Spread:
        """Return the spread of ranks that are each on a host of their own."""
        return cls(tuple(counts), tuple(range(len(counts))))

    @classmethod
    def together(cls, counts: Sequence[int]) -> Spread:
        """Return the spread of ranks that share one host."""
        return cls(tuple(counts), (0,) * len(counts))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.counts)

    @cached_property
    def replicas(self) -> int:
        """The number of replicas."""
        return sum(self.counts)

    @cached_property
    def blocks(self) -> tuple[TreeNode, ...]:
        """The replicas of each rank; a block need not be a node of the tree."""
        stops = list(accumulate(self.counts))
        return tuple(TreeNode(stop - count, stop) for stop, count in zip(stops, self.counts, strict=True))

    @cached_property
    def sums(self) -> tuple[tuple[TreeNode, ...], ...]:
        """The largest nodes that each rank can add up by itself."""
        return tuple(subtrees(*block, self.replicas) for block in self.blocks)

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        ranks: list[list[int]] = [[] for _ in range(max(self.hosts) + 1)]
        for rank, host in enumerate(self.hosts):
            ranks[host].append(rank)
        return tuple(map(tuple, ranks))

    def leaves(self, rank: int) -> tuple[TreeNode, ...]:
        """Return the leaves of a rank: its contributions."""
        first, stop = self.blocks[rank]
        return tuple(TreeNode(replica, replica + 1) for replica in range(first, stop))


def host_numbers(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """Assign numbers from 0 to the hosts, in order of appearance; `hosts` has one entry per rank."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)
