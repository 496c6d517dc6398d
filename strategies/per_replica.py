"""Values of which every replica has its own, and values that all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from strategies.typing import Tree


@dataclass(frozen=True)
class PerReplica:
    """One value per local replica.

    Attributes:
        values: in replica order, the local replicas only; each a pytree.
        replicas: the global indices of these replicas, where the strategy has made it; None for those that are local
            where it is used.
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
    """A pytree that every replica gets whole."""

    value: Tree


def dealt(value: Tree, replicas: range) -> Tree:
    """Return the value; where a part of it is a `PerReplica`, one `PerReplica` of whole trees.

    Args:
        value: a pytree whose leaves may be `PerReplica`.
        replicas: the local replicas.

    Raises:
        ValueError: a `PerReplica` has not as many values as there are local replicas, or is of others.
    """
    parts = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, PerReplica)]
    for part in parts:
        _check(part, replicas)
    if isinstance(value, PerReplica) or not parts:
        return value
    return PerReplica(
        tuple(
            jax.tree.map(lambda leaf, i=position: leaf[i] if isinstance(leaf, PerReplica) else leaf, value)
            for position in range(len(replicas))
        ),
        replicas,
    )


def _check(part: PerReplica, replicas: range) -> None:
    if len(part) != len(replicas):
        raise ValueError(
            f"a PerReplica has {len(part)} values, and this instance has {len(replicas)} replicas; "
            "make it with strategy.per_replica"
        )
    if part.replicas not in (None, replicas):
        raise ValueError(
            f"a PerReplica is of the replicas {list(part.replicas)}, and this instance has {list(replicas)}; make it "
            "with the strategy that uses it, and anew when an instance was lost"
        )
