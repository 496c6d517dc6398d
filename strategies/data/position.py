"""How far a program has read a data set."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from strategies.data.layout import Remainder


@dataclass(frozen=True)
class Position:
    """How far a program has read a data set, and the data set it belongs to.

    Attributes:
        epoch: the epoch being read.
        step: global steps of it that were consumed; prefetched ones do not count.
        seed: seed of the shuffle.
        batch_size: elements per replica and step, those of all its micro-batches.
        total_replicas: replicas of all instances. The number of instances is not part of a position.
        length: elements of the data set, None when unknown.
        shuffle: whether epochs are shuffled.
        remainder: what becomes of an incomplete last batch.
    """

    epoch: int
    step: int
    seed: int
    batch_size: int
    total_replicas: int
    length: int | None
    shuffle: bool = True
    remainder: Remainder = "drop"

    def to_dict(self) -> dict[str, int | str | None]:
        """The position as a dictionary of numbers and strings, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Position":
        """The inverse of `to_dict`; ValueError when `values` is not what that returned."""
        try:
            return cls(**cast(dict[str, Any], values))
        except TypeError as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{dict(values)!r} is not a position of a data set; one has {names}") from error
