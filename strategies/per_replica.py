"""Values of which every replica has its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class PerReplica:
    """One value per local replica.

    Attributes:
        values: in replica order, the local replicas only; each a pytree.
    """

    values: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, position: int) -> Any:
        return self.values[position]


def dealt(value: Any, replicas: int) -> Any:
    """The value; where a part of it is a `PerReplica`, one `PerReplica` of whole trees.

    Args:
        value: a pytree whose leaves may be `PerReplica`.
        replicas: the local replicas.

    Raises:
        ValueError: a `PerReplica` has not as many values as there are local replicas.
    """
    parts = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, PerReplica)]
    for part in parts:
        if len(part) != replicas:
            raise ValueError(
                f"a PerReplica has {len(part)} values, and this instance has {replicas} replicas; "
                "make it with strategy.per_replica"
            )
    if isinstance(value, PerReplica) or not parts:
        return value
    return PerReplica(
        tuple(
            jax.tree.map(lambda leaf, i=position: leaf[i] if isinstance(leaf, PerReplica) else leaf, value)
            for position in range(replicas)
        )
    )
