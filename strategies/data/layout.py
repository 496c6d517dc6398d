"""The elements that each replica reads at each step, and positions in a data set; the same on every instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from strategies.argument_checks import positive
from strategies.typing import Tree

TRACED: ContextVar[Tree] = ContextVar("program", default=None)
"""The program that is being traced; None outside of one."""


@dataclass(frozen=True)
class Replication:
    """The replicas that run a program.

    Attributes:
        local: Global indices of the replicas of this instance.
        total: Number of replicas of all instances.
    """

    local: range
    total: int

    def __str__(self) -> str:
        if len(self.local) == self.total:
            return f"{self.total} replicas"
        return f"replicas {self.local.start} to {self.local.stop - 1} of {self.total}"


def is_in_program() -> bool:
    """Return whether `strategy.run`, a loss function or a loop is being traced."""
    return TRACED.get() is not None


Remainder = Literal["drop", "pad", "short"]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The rule that assigns elements to replicas, and the local replicas.

    Step s takes positions `[s * B * R, (s + 1) * B * R)` of the epoch's order (B: `elements_per_replica`, R:
    `total_replicas`). Replica r takes positions `[r * B, (r + 1) * B)` of these. Instances play no part.

    Attributes:
        batch_size: Elements per replica and micro-batch.
        total_replicas: Number of replicas of all instances.
        local_replicas: Global indices of the replicas of this instance.
        remainder: Treatment of the elements that do not fill a global batch: `"drop"` them, `"pad"` the batch, or make
            a `"short"` last step. In a short step every replica takes the same number; elements too few for one more in
            each micro-batch are dropped.
        gradient_accumulation_count: Micro-batches that a replica takes in one step.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range, or `remainder` is unknown.
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
        """Whether an incomplete last batch is padded."""
        return self.remainder == "pad"

    @property
    def elements_per_replica(self) -> int:
        """The number of elements that a replica takes in one step: all its micro-batches, one after another."""
        return self.batch_size * self.gradient_accumulation_count

    @property
    def global_batch_size(self) -> int:
        """The number of elements that all replicas take in one step."""
        return self.elements_per_replica * self.total_replicas

    def steps(self, length: int) -> int:
        """Return the number of steps in an epoch over `length` elements."""
        whole, rest = divmod(length, self.global_batch_size)
        return whole + (self.pads and rest > 0 or self.of_short_step(rest) > 0)

    def of_short_step(self, rest: int) -> int:
        """Return the elements per replica of a short last step, if `rest` elements are left for it; 0 without one."""
        if self.remainder != "short":
            return 0
        micro_batches = self.total_replicas * self.gradient_accumulation_count
        return rest // micro_batches * self.gradient_accumulation_count

    def dropped(self, length: int) -> int:
        """Return the number of the `length` elements that no replica sees in an epoch."""
        whole, rest = divmod(length, self.global_batch_size)
        return 0 if self.pads else rest - self.of_short_step(rest) * self.total_replicas

    def positions(self, step: int, length: int | None = None) -> Indices:
        """Return the positions of the local replicas' elements in the epoch's order, in replica order.

        Positions past the last element occur only in the last step of a layout that pads.

        Args:
            step: Step of the epoch.
            length: Number of elements of the epoch; needed if the last step may be short.
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
            f"of {self.total_replicas} replicas), but the data set has {length}; use {smaller}, or "
            "remainder='pad'"
        )

    @property
    def described(self) -> str:
        """The number of elements that one replica takes in one step, for messages."""
        count = self.gradient_accumulation_count
        return str(self.batch_size) if count == 1 else f"{self.batch_size} x {count} accumulated"


@dataclass(frozen=True)
class Position:
    """A place in a data set, up to which a program has read it, and the identity of the data set.

    Example::

        saved = dataset.position().to_dict()                      # ready for JSON
        dataset.restore(strategies.Position.from_dict(saved))     # in another process, with any number of instances

    Attributes:
        epoch: Epoch being read.
        step: Number of global steps of this epoch that were consumed, without prefetched ones.
        seed: Seed of the shuffle.
        batch_size: Elements per replica and step, over all its micro-batches.
        total_replicas: Number of replicas of all instances. The number of instances is not part of a position.
        length: Number of elements of the data set; None if unknown.
        shuffle: Whether epochs are shuffled.
        remainder: Treatment of an incomplete last batch; see `Layout`.
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
    def from_dict(cls, values: Mapping[str, object]) -> Position:
        """Return the position that `to_dict` turned into `values`; raise ValueError for any other dictionary."""
        try:
            return cls(**cast(dict[str, Any], values))
        except TypeError as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{dict(values)!r} is not a position of a data set; a position has {names}") from error


def epoch_order(length: int, seed: int, epoch: int, *, shuffle: bool = True) -> Indices:
    """Return the order in which one epoch goes through the data set: a permutation of `range(length)`.

    It sorts raw PCG64 words instead of calling `Generator.permutation`. NumPy keeps the words forever, but may change
    the permutation in any release (NEP 19), and instances may run different releases.
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
