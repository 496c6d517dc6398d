"""The elements that each replica reads at each step, and the position in the data set; the same on every instance."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from strategies.argument_checks import positive

Remainder = Literal["drop", "pad", "short"]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The rule by which elements are dealt to replicas, and the replicas that live here.

    Step s takes positions `[s * B * R, (s + 1) * B * R)` of the epoch's order (B: `elements_per_replica`, R:
    `total_replicas`); replica r takes positions `[r * B, (r + 1) * B)` of those. Instances play no part.

    Attributes:
        batch_size: elements per replica and micro-batch.
        total_replicas: replicas of all instances.
        local_replicas: global indices of the replicas of this instance.
        remainder: what becomes of elements that do not fill a global batch: `"drop"` or `"pad"` them, or have a last
            step that is `"short"`: every replica takes equally many of them, and those are dropped that are too few
            for one more in each micro-batch.
        gradient_accumulation_count: micro-batches that a replica takes in one step.

    Raises:
        TypeError: when a number is not an integer.
        ValueError: when a number is out of range or `remainder` is unknown.
    """

    batch_size: int
    total_replicas: int
    local_replicas: Sequence[int]
    remainder: Remainder = "drop"
    gradient_accumulation_count: int = 1

    def __post_init__(self) -> None:
        positive("batch_size", self.batch_size)
        positive("gradient_accumulation_count", self.gradient_accumulation_count)
        positive("total_replicas", self.total_replicas)
        if not self.local_replicas:
            raise ValueError("local_replicas is empty; an instance drives at least one replica")
        outside = [r for r in self.local_replicas if not 0 <= r < self.total_replicas]
        if outside:
            raise ValueError(
                f"local replicas {outside} do not exist; replicas are numbered 0 to {self.total_replicas - 1}"
            )
        if self.remainder not in get_args(Remainder):
            raise ValueError(f"remainder={self.remainder!r} is unknown; use 'drop', 'pad' or 'short'")

    @property
    def pads(self) -> bool:
        """Whether an incomplete last batch is padded rather than dropped."""
        return self.remainder == "pad"

    @property
    def elements_per_replica(self) -> int:
        """Elements that one replica takes in one step: all its micro-batches, one after another."""
        return self.batch_size * self.gradient_accumulation_count

    @property
    def global_batch_size(self) -> int:
        """Elements that all replicas together take in one step."""
        return self.elements_per_replica * self.total_replicas

    def steps(self, length: int) -> int:
        """Return the steps in an epoch over `length` elements."""
        whole, rest = divmod(length, self.global_batch_size)
        return whole + (self.pads and rest > 0 or self.of_short_step(rest) > 0)

    def of_short_step(self, rest: int) -> int:
        """Elements that each replica takes of so many that do not fill a global batch, where the last step is short."""
        if self.remainder != "short":
            return 0
        micro_batches = self.total_replicas * self.gradient_accumulation_count
        return rest // micro_batches * self.gradient_accumulation_count

    def dropped(self, length: int) -> int:
        """Return how many elements of `length` no replica sees in an epoch."""
        whole, rest = divmod(length, self.global_batch_size)
        return 0 if self.pads else rest - self.of_short_step(rest) * self.total_replicas

    def positions(self, step: int, length: int | None = None) -> Indices:
        """Return the positions in the epoch's order of the local replicas' elements, in replica order.

        Positions past the last element only occur in the last step of a layout that pads.

        Args:
            step: the step.
            length: elements of the epoch, for the last step where that is short.
        """
        first = step * self.global_batch_size
        count = self.elements_per_replica
        if length is not None and self.remainder == "short" and length - first < self.global_batch_size:
            count = self.of_short_step(length - first)
        starts = first + count * np.asarray(self.local_replicas, np.int64)
        return (starts[:, None] + np.arange(count, dtype=np.int64)).reshape(-1)

    def check_length(self, length: int) -> None:
        """Raise ValueError unless `length` elements make at least one step."""
        if length == 0:
            raise ValueError("the data set is empty; at least one element is needed")
        if self.steps(length) > 0:
            return
        largest = length // (self.total_replicas * self.gradient_accumulation_count)
        fewer = f"at most {length} {'replicas' if self.gradient_accumulation_count == 1 else 'micro-batches'}"
        smaller = f"a batch_size of at most {largest}" if largest else fewer
        raise ValueError(
            f"one global batch takes {self.global_batch_size} elements (batch_size {self.described} on each "
            f"of {self.total_replicas} replicas) and the data set has {length}; use {smaller}, or "
            "remainder='pad'"
        )

    @property
    def described(self) -> str:
        """The number of elements that one replica takes in one step, for messages."""
        count = self.gradient_accumulation_count
        return str(self.batch_size) if count == 1 else f"{self.batch_size} x {count} accumulated"


@dataclass(frozen=True)
class Position:
    """The place in a data set up to which a program has read it, and the identity of the data set.

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
        """Return the position as a dictionary of numbers and strings, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Position":
        """Return the position of a dictionary; ValueError if `to_dict` has not returned it."""
        try:
            return cls(**cast(dict[str, Any], values))
        except TypeError as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{dict(values)!r} is not a position of a data set; one has {names}") from error


def epoch_order(length: int, seed: int, epoch: int, *, shuffle: bool = True) -> Indices:
    """Return the order in which one epoch goes through the data set: a permutation of `range(length)`.

    It sorts raw PCG64 words instead of calling `Generator.permutation`: NumPy keeps the former for ever and
    may change the latter in any release (NEP 19), and instances may run different releases.
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
