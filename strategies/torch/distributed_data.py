"""Data sets that are sharded over replicas: batches of tensors, or indices for PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch

import strategies.trees as trees
from popdist.switches import require_switches
from strategies.data.datasets import DistributedDataset
from strategies.data.layout import Layout, Remainder, epoch_order
from strategies.data.randomness import kept_generators, seed_for
from strategies.strategy import Strategy
from strategies.torch.collated import CollatedSource, CollateFn
from strategies.torch.tensors import as_array, tensors_of
from strategies.typing import Data, Element


def distribute_dataset(
    strategy: Strategy,
    source: Data,
    batch_size: int,
    seed: int = 0,
    *,
    shuffle: bool = True,
    remainder: Remainder = "drop",
    gradient_accumulation_count: int = 1,
    prefetch: int = 2,
    collate_fn: CollateFn | None = None,
) -> DistributedDataset:
    """Shard a data set over the replicas, as `strategy.distribute_dataset` does, with batches of tensors.

    The tensors have the dtypes of the source.

        dataset = strategies.torch.distribute_dataset(strategy, (images, labels), batch_size=32, seed=0)
        for epoch in range(3):
            for batch in dataset.epoch(epoch):
                metrics = trainer.step(batch)

    Args:
        strategy: The strategy whose replicas get the shards.
        source: A pytree of tensors or arrays, a `torch.utils.data.Dataset` with a length, or another source that
            `DistributedDataset` takes. Random numbers that its elements draw depend on the seed, the epoch and the
            element.
        batch_size: Elements per replica and micro-batch.
        seed: The seed of the shuffle, the same on all instances.
        shuffle: Whether arrays and random-access sources are shuffled.
        remainder: "drop" or "pad" the elements that do not fill the last global batch.
        gradient_accumulation_count: Micro-batches that each replica takes in one step, one after another.
        prefetch: Number of batches that are prepared ahead.
        collate_fn: Function that makes a micro-batch of a replica from the list of its elements, as that of PyTorch's
            DataLoader. Its result may have any structure, and tensors of unequal shapes. Batches are `CollatedBatch`.
            A list is then a data set of its elements, as for DataLoader.

    Raises:
        TypeError: If there is a `collate_fn`, and the source has no length or no `[i]`.
    """
    dataset = DistributedDataset(
        _of_arrays(source) if collate_fn is None else CollatedSource(_of_tensors(source), collate_fn, tensors_of),
        batch_size=batch_size,
        total_replicas=strategy.replicas.num_replicas_in_sync,
        local_replicas=strategy.replicas.local_replicas,
        seed=seed,
        shuffle=shuffle,
        remainder=remainder,
        gradient_accumulation_count=gradient_accumulation_count,
        prefetch=prefetch,
        place=lambda batch: strategy.replicas.dealing.noted(tensors_of(batch)),
        communicator=strategy.replicas.communicator,
        instruments=strategy.instruments,
        is_spare=lambda: strategy.replicas.is_spare,
        is_read_again=strategy.can_carry_on,
    )
    strategy.replicas.adopt(dataset, gradient_accumulation_count * batch_size)
    return dataset


class RowOfEpoch(int):
    """The index of an element that is read in an epoch. Worker processes of a loader get it pickled."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> RowOfEpoch:
        """Make an index."""
        row = super().__new__(cls, index)
        row.epoch = epoch
        return row

    def __reduce__(self) -> tuple[type[RowOfEpoch], tuple[int, int]]:
        return RowOfEpoch, (int(self), self.epoch)


class SeededRows(torch.utils.data.Dataset[Element]):
    """A data set whose elements draw random numbers that depend on the seed, the epoch and the element alone.

    No other thread of the process may draw from the global generators meanwhile. Their states are restored.

    Args:
        dataset: The data set. Its elements are read by a `RowOfEpoch`.
        seed: The seed.
    """

    def __init__(self, dataset: torch.utils.data.Dataset[Element], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type, unused-ignore]

    def __getitem__(self, index: int) -> Element:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Element]:
        """Return the elements of a batch, for PyTorch's loader."""
        with kept_generators():  # which takes as long as seeding for ten elements
            return [self._seeded(index) for index in indices]

    def _seeded(self, index: int) -> Element:
        seed_for(self._seed, getattr(index, "epoch", 0), index)
        return self._dataset[int(index)]


class DistributedSampler(torch.utils.data.Sampler[int]):
    """A sampler of this instance's shard: the indices of the elements that `distribute_dataset` gives to its replicas.

        sampler = strategies.torch.DistributedSampler(dataset, strategy, batch_size=32)
        loader = torch.utils.data.DataLoader(dataset, sampler.instance_batch_size, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    The elements that a replica reads depend on the seed, the epoch and the number of replicas, and not on the number of
    instances. If elements draw random numbers, as for random crops, give the loader `sampler.seeded(dataset)`.

    Args:
        dataset: Any object with a length.
        strategy: The strategy whose replicas share the data set.
        batch_size: Elements per replica and micro-batch.
        seed: The seed of the shuffle, the same on all instances.
        shuffle: Whether the elements are shuffled.
        remainder: "drop" an incomplete last global batch, or "pad" it with elements from the beginning of the epoch,
            as PyTorch's sampler does.
        gradient_accumulation_count: Micro-batches that each replica takes in one step, one after another.

    Attributes:
        epoch: The number of the permutation that is read.

    Raises:
        TypeError: If `shuffle` is neither True nor False.
        ValueError: If the data set is smaller than one global batch.
    """

    def __init__(
        self,
        dataset: Sized,
        strategy: Strategy,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        remainder: Remainder = "drop",
        gradient_accumulation_count: int = 1,
    ) -> None:
        require_switches(shuffle=shuffle)
        replicas = strategy.replicas
        self._length = len(dataset)
        self._layout = Layout(
            batch_size,
            replicas.num_replicas_in_sync,
            replicas.local_replicas,
            remainder,
            gradient_accumulation_count,
        )
        self._layout.check_length(self._length)
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 0

    @property
    def instance_batch_size(self) -> int:
        """The number of elements that this instance reads in one step: the batch size of its loader."""
        return self._layout.elements_per_replica * len(self._layout.local_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation that the next `iter` reads."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._layout.steps(self._length) * self.instance_batch_size

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self._length, self._seed, self.epoch, shuffle=self._shuffle)
        for step in range(self._layout.steps(self._length)):
            for index in order[self._layout.positions(step) % self._length].tolist():
                yield RowOfEpoch(index, self.epoch)

    def seeded(self, dataset: torch.utils.data.Dataset[Element]) -> torch.utils.data.Dataset[Element]:
        """Return the data set with random numbers that depend on the seed, the epoch and the element alone.

            loader = DataLoader(sampler.seeded(dataset), sampler.instance_batch_size, sampler=sampler, num_workers=4)

        Each element that is read seeds the global generators of PyTorch (on the CPU), NumPy and Python, so every number
        of instances and workers draws the same. Their states are restored afterwards.

        Args:
            dataset: A data set with `[i]`.
        """
        return SeededRows(dataset, self._seed)


def _of_tensors(source: object) -> object:
    return source.tensors if isinstance(source, torch.utils.data.TensorDataset) else source


def _of_arrays(source: object) -> object:
    """Return the source with arrays in place of tensors."""
    source = _of_tensors(source)
    return trees.map(lambda leaf: as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf, source)
