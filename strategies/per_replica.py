"""Values of single replicas, and values that all replicas share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import strategies.trees as trees
from strategies.typing import Tree


@dataclass(frozen=True)
class PerReplica:
    """One value per local replica.

    Example::

        offsets = strategy.per_replica(lambda r: float(r))  # on an instance with replicas 4 to 7:
        list(offsets)                                       # [4.0, 5.0, 6.0, 7.0]

    Attributes:
        values: Pytrees of the local replicas, in replica order.
        replicas: Global indices of these replicas if a strategy made the object; None for the local replicas of the
            instance that uses it.
    """

    values: Sequence[Tree]
    replicas: range | None = field(default=None, compare=False, repr=False)

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, position: int) -> Tree:
        return self.values[position]


@dataclass(frozen=True)
class Shared:
    """A pytree that every replica gets as a whole."""

    value: Tree


def dealt(value: Tree, replicas: range) -> Tree:
    """Turn a tree with `PerReplica` leaves into one `PerReplica` of trees; return any other tree unchanged.

    Args:
        value: Pytree whose leaves may be `PerReplica`.
        replicas: Global indices of the local replicas.

    Raises:
        ValueError: If a `PerReplica` does not have one value per local replica, or belongs to other replicas.
    """
    parts = [leaf for leaf in trees.leaves(value) if isinstance(leaf, PerReplica)]
    for part in parts:
        _check(part, replicas)
    if isinstance(value, PerReplica) or not parts:
        return value
    return PerReplica(
        tuple(
            trees.map(lambda leaf, i=position: leaf[i] if isinstance(leaf, PerReplica) else leaf, value)
            for position in range(len(replicas))
        ),
        replicas,
    )


def _check(part: PerReplica, replicas: range) -> None:
    if len(part) != len(replicas):
        raise ValueError(
            f"a PerReplica has {len(part)} values, but this instance has {len(replicas)} replicas; "
            "make it with strategy.per_replica"
        )
    if part.replicas not in (None, replicas):
        raise ValueError(
            f"a PerReplica belongs to the replicas {list(part.replicas)}, but this instance has {list(replicas)}; make "
            "it with the strategy that uses it, and make it again after an instance was lost"
        )
