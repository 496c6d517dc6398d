"""Groups of replicas of equal size, each with collectives of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.argument_checks import at_least
from strategies.typing import Leaf


@dataclass(frozen=True)
class ReplicaGroups:
    """The division of replicas into groups: blocks of neighbours, or groups orthogonal to such blocks.

    With 8 replicas in groups of 4, the consecutive groups are {0, 1, 2, 3} and {4, 5, 6, 7}. The orthogonal groups are
    {0, 2, 4, 6} and {1, 3, 5, 7}.

    Attributes:
        size: Number of replicas per group; 0 for one group of all.
        is_orthogonal: Whether the distance between members of a group is the number of groups.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is negative.
    """

    size: int = 0
    is_orthogonal: bool = False

    def __post_init__(self) -> None:
        at_least(0, "replica_group_size", self.size)

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> ReplicaGroups:
        """Return the division that these lists of replicas form.

        Raises:
            ValueError: They do not form equal groups, consecutive or orthogonal.
        """
        wanted = tuple(tuple(group) for group in groups)
        size = len(wanted[0]) if wanted else 0
        for found in (cls(size), cls(size, is_orthogonal=True)):
            if size and found._divide(size * len(wanted)) == wanted:
                return found
        raise ValueError(
            f"replica groups {[list(group) for group in groups]} are irregular or empty; use groups of equal size that "
            "are consecutive, or orthogonal to such groups"
        )

    def members(self, total_replicas: int) -> tuple[tuple[int, ...], ...]:
        """Return the replicas of each group, in order.

        Raises:
            ValueError: The replicas cannot be divided evenly.
        """
        if self.size and total_replicas % self.size:
            sizes = [size for size in range(1, total_replicas + 1) if total_replicas % size == 0]
            raise ValueError(
                f"The replica group size (got {self.size}) does not evenly divide the total number of replicas (got "
                f"{total_replicas}); use one of {', '.join(map(str, sizes))}"
            )
        return self._divide(total_replicas)

    def rank(self, replica: Leaf, total_replicas: int) -> Leaf:
        """Return the place of a replica in its group; the replica may be a traced integer."""
        members = self.members(total_replicas)
        return replica // len(members) if self.is_orthogonal else replica % len(members[0])

    def _divide(self, total: int) -> tuple[tuple[int, ...], ...]:
        size = self.size or total
        count = total // size
        if self.is_orthogonal:
            return tuple(tuple(range(group, total, count)) for group in range(count))
        return tuple(tuple(range(group * size, (group + 1) * size)) for group in range(count))
