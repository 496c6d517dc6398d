"""Deals one data set out to the replicas of all instances, the same way on any number of instances."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax

from collectives import Communicator
from strategies.input_context import InputContext
from strategies.lockstep import in_lockstep
from strategies.position import Position
from strategies.prefetch import prefetched
from strategies.sharding import Layout, Remainder, at_least
from strategies.sources import ArraySource, Batch, Masked, Source
from strategies.streams import from_iterable, from_shards, from_values

__all__ = ["Batch", "DistributedDataset", "InputContext", "Masked", "Position"]

log = logging.getLogger(__name__)


class DistributedDataset:
    """The local replicas' share of a data set, as one batch per step.

    What a replica reads depends on the source, the seed and the number of replicas, never on the number of
    instances. A source is one of:

    * A pytree of arrays with a common leading length (tuples and mappings; NumPy's memory maps are read as
      needed). Every epoch is one permutation of the whole set drawn from (seed, epoch); replica r takes rows
      `[r * batch_size, (r + 1) * batch_size)` of each global batch.
    * An object with `shard(n, i)`: replica r iterates `source.shard(total_replicas, r)`, anew every epoch.
      The steps per epoch follow from the lengths of the shards, or else from `len(source)` dealt out evenly.
    * An iterable of elements (a list is one): replica r takes elements r, r + R, r + 2R, ... Every instance
      goes through the whole iterable.
    * An object whose `values` holds one iterable per local replica (`strategies.PerReplica`).

    Only arrays are shuffled here; the others come in their own order. Elements are pytrees of arrays or
    scalars and are stacked. Without lengths, an epoch ends when one of the local replicas cannot fill a batch
    (or, when padding, when all of them have ended).

    The steps of an epoch over arrays are computed, alike on all instances. For any other source the instances
    agree before every batch whether all of them have one: **taking a batch is then a collective call**, and an epoch
    ends for all at the step at which the first instance has none, with a warning (see `strategies.lockstep`).

    Args:
        source: see above.
        batch_size: elements per replica and step.
        total_replicas: replicas of all instances.
        local_replicas: global indices of the replicas of this instance.
        seed: seed of the shuffle, the same on all instances.
        shuffle: whether to shuffle arrays.
        remainder: `"drop"` the elements that do not fill the last global batch, or `"pad"` it by repeating
            elements; every batch is then a `Masked`.
        prefetch: batches to prepare ahead in a background thread; 0 prepares them when they are asked for.
        place: puts a batch of host arrays on the devices; runs in the prefetch thread.
        communicator: connects the instances; None where there is only this one.

    Raises:
        TypeError: when the source is of no known kind, or an argument is of the wrong type.
        ValueError: when the source is empty or inconsistent, or smaller than one global batch.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int,
        total_replicas: int,
        local_replicas: Sequence[int],
        seed: int = 0,
        shuffle: bool = True,
        remainder: Remainder = "drop",
        prefetch: int = 2,
        place: Callable[[Batch], Batch] = lambda batch: batch,
        communicator: Communicator | None = None,
    ) -> None:
        self._layout = Layout(batch_size, total_replicas, local_replicas, remainder)
        self._seed = at_least(0, "seed", seed)
        self._shuffle = shuffle
        self._prefetch = at_least(0, "prefetch", prefetch)
        self._place = place
        self._communicator = communicator if communicator is not None and communicator.size > 1 else None
        self._source = open_source(source, self._layout, seed=seed, shuffle=shuffle)
        self._consumed = (0, 0)
        self._resume: tuple[int, int] | None = None
        if self.dropped:
            log.info(
                "%d of %s elements are dropped in every epoch: they do not fill a global batch of %d",
                self.dropped,
                self._source.length,
                self._layout.global_batch_size,
            )

    def __len__(self) -> int:
        """Steps per epoch; TypeError when the source does not tell."""
        if self._source.steps is None:
            raise TypeError("the data set's source does not tell how many elements it has")
        return self._source.steps

    @property
    def dropped(self) -> int | None:
        """Elements that no replica sees in an epoch, None when the source does not tell its length."""
        if self._source.length is None or self._source.steps is None:
            return None
        return max(0, self._source.length - self._source.steps * self._layout.global_batch_size)

    def epoch(self, epoch: int) -> Generator[Batch, None, None]:
        """Yields this instance's batch of every global step of an epoch.

        Leaves have shape `[len(local_replicas) * batch_size, ...]`: the local replicas' elements in replica
        order. Where the source is none of arrays and there are several instances, each batch is a collective call.
        """
        at_least(0, "epoch", epoch)
        start = 0
        if self._resume is not None and self._resume[0] == epoch:
            start, self._resume = self._resume[1], None
        return self._read(epoch, start)

    def position(self) -> Position:
        """Where the program is: after the batch that was yielded last.

        Once the loop over an epoch has ended this is the beginning of the next one.
        """
        epoch, step = self._consumed
        return Position(epoch, step, **self._identity())

    def restore(self, position: Position) -> None:
        """Makes the next `epoch(position.epoch)` begin at that step; other epochs begin at 0.

        Sources other than arrays are read and skipped up to there.

        Raises:
            ValueError: when the position belongs to a data set that is read differently.
        """
        own, saved = self._identity(), position.to_dict()
        different = [name for name in own if own[name] != saved[name]]
        if different:
            theirs, ours = (", ".join(f"{name} {of[name]!r}" for name in different) for of in (saved, own))
            raise ValueError(
                f"the position was saved with {theirs} and this data set has {ours}; restore it with the same"
            )
        at_least(0, "epoch", position.epoch)
        if at_least(0, "step", position.step) > (self._source.steps or position.step):
            raise ValueError(f"the position is at step {position.step} of an epoch of {self._source.steps} steps")
        self._consumed = self._resume = (position.epoch, position.step)

    def _identity(self) -> dict[str, Any]:
        """The fields of a position that must agree for it to mean the same elements."""
        return {
            "seed": self._seed,
            "batch_size": self._layout.batch_size,
            "total_replicas": self._layout.total_replicas,
            "length": self._source.length,
            "shuffle": self._shuffle,
            "remainder": self._layout.remainder,
        }

    def _read(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        self._consumed = (epoch, start)
        batches = prefetched(self._placed(epoch, start), self._prefetch)
        try:
            for step, batch in enumerate(self._agreed(batches, epoch, start), start + 1):
                self._consumed = (epoch, step)
                yield batch
            self._consumed = (epoch + 1, 0)
        finally:
            batches.close()

    def _agreed(self, batches: Generator[Batch, None, None], epoch: int, start: int) -> Generator[Batch, None, None]:
        """The batches of the steps that all instances make."""
        if self._communicator is None or isinstance(self._source, ArraySource):
            return batches
        return in_lockstep(batches, self._communicator, f"epoch {epoch}", start)

    def _placed(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        for batch in self._source.batches(epoch, start):
            yield self._place(batch)


def open_source(source: Any, layout: Layout, *, seed: int, shuffle: bool) -> Source:
    """Finds out what kind of data set `source` is (see `DistributedDataset`).

    Raises:
        TypeError: when it is none, or can only be gone through once.
        ValueError: when it cannot be dealt out as `layout` says.
    """
    if callable(getattr(source, "shard", None)):
        return from_shards(source, layout)
    if isinstance(getattr(source, "values", None), list | tuple):
        return from_values(source.values, layout)
    if isinstance(source, Mapping) and jax.tree_util.all_leaves([source]):
        source = dict(source)  # a mapping that JAX does not know to be one
    if _is_pytree_of_arrays(source):
        return ArraySource(source, layout, seed=seed, shuffle=shuffle)
    return from_iterable(source, layout)


def _is_pytree_of_arrays(source: Any) -> bool:
    if isinstance(source, list):
        return False
    return not jax.tree_util.all_leaves([source]) or hasattr(source, "shape")
