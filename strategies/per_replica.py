"""Values of which every replica has its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


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
