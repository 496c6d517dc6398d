"""The batches of an instance's replicas in one step, which Lightning's loop passes on as one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import final

from strategies.errors import StrategyError
from strategies.typing import Batch


@final
class ReplicaBatches:
    """The batches of the local replicas. Hooks such as `on_train_batch_start` get it in place of a batch.

        for replica, batch in batches.items():
            ...

    Args:
        of_each: The batch of each local replica that has rows in this step, by the replica's global index.
        is_whole: Whether every replica of all instances has rows. In the last step of an evaluation some may have none.

    Attributes:
        is_whole: The argument.
    """

    def __init__(self, of_each: Mapping[int, Batch], is_whole: bool = True) -> None:
        self._of_each = dict(of_each)
        self.is_whole = is_whole

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the batches, in the order of the replicas."""
        return iter(self._of_each.values())

    def __len__(self) -> int:
        """Return the number of local replicas with rows."""
        return len(self._of_each)

    def __getitem__(self, replica: int) -> Batch:
        """Return the batch of a replica, given its global index."""
        return self._of_each[replica]

    def items(self) -> Iterator[tuple[int, Batch]]:
        """Return an iterator over the global indices of replicas and their batches."""
        return iter(self._of_each.items())

    def map(self, function: Callable[[int, Batch], Batch]) -> ReplicaBatches:
        """Return the results of `function(replica, batch)` in place of the batches."""
        return ReplicaBatches({one: function(one, batch) for one, batch in self.items()}, self.is_whole)


def is_dealt(batch: object) -> bool:
    """Return whether a batch has batches of replicas in it; an example of a model's input has none."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return isinstance(batch, ReplicaBatches) or any(map(is_dealt, parts))


def by_replica(batch: object) -> ReplicaBatches:
    """Return batches of several loaders, in a dictionary, list or tuple, as one batch of such a kind for each replica.

    Raises:
        StrategyError: If a batch was not dealt to replicas, or the replicas of two loaders differ.
    """
    if isinstance(batch, ReplicaBatches):
        return batch
    if isinstance(batch, Mapping):
        joined = by_replica(list(batch.values()))
        return joined.map(lambda replica, values: dict(zip(batch, values, strict=True)))
    if isinstance(batch, list | tuple) and batch:
        parts = [None if one is None else by_replica(one) for one in batch]
        there = [one for one in parts if one is not None]
        if there and all(dict(one.items()).keys() == dict(there[0].items()).keys() for one in there):
            kind = type(batch)
            return there[0].map(lambda replica, _: kind(None if one is None else one[replica] for one in parts))
    raise StrategyError(
        f"the strategy 'popdist' got a batch of type {type(batch).__name__} that was not dealt to replicas; give "
        "Lightning a DataLoader, and let training_step take the batch, not the iterator of the loader"
    )
