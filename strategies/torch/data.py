"""Data sets of PyTorch for the replicas of all instances, and batches that a program has put together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import TypeAlias, final

import numpy as np
import torch
from typing_extensions import override

import strategies.trees as trees
from collectives.arrays import ALIGNMENT_BYTES
from popdist.switches import require_switches
from strategies.core.agreement import digest_of_arrays
from strategies.data.datasets import DistributedDataset, is_pytree_of_arrays
from strategies.data.layout import Indices, Layout, Remainder, epoch_order
from strategies.data.randomness import kept_generators, seeded
from strategies.data.sources import DataSource, RandomAccess, RandomAccessSource, SourceFactory, Steps, common_length
from strategies.late_jax import is_jax_array
from strategies.strategy import Strategy
from strategies.torch.tensors import as_array, as_tensor, dtype_of
from strategies.trees import ShapeOfArray
from strategies.typing import Batch, Data, Element

CollateFn: TypeAlias = Callable[[list[Element]], Batch]
"""(the elements of a micro-batch) -> the batch, as `collate_fn` of PyTorch's DataLoader."""


@final
class CollatedBatch:
    """A batch in parts: one for each micro-batch of each local replica, in the order of the replicas.

        metrics = trainer.step(strategies.torch.CollatedBatch([{"x": [short, long], "names": ["a", "b"]}]))

    A part is what the loss function gets. It has any structure of lists, tuples, dictionaries and other objects, and
    its tensors have any shapes: no tensor is cut along its first axis, and shapes may differ between instances.
    `distribute_dataset` gives such batches with a `collate_fn`.

    Args:
        parts: The parts.
        rows: The number of elements in all parts, for throughput; None for the number of parts.
        shortened: Function that returns the parts of the given numbers of elements; None if no element is padding.

    Attributes:
        parts: The parts.
        shape: The number of elements.
    """

    dtype = np.dtype(object)

    def __init__(
        self,
        parts: Sequence[Batch],
        rows: int | None = None,
        shortened: Callable[[Sequence[int]], Sequence[Batch]] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.shape = (len(self.parts) if rows is None else rows,)
        self._shortened = shortened

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(one.nbytes for part in self.parts for one in _tensors(part))

    @property
    def _version(self) -> list[int]:
        """The numbers of changes of the tensors in place, as a tensor has one."""
        return [one._version for part in self.parts for one in _tensors(part)]

    @property
    def words(self) -> np.ndarray:
        """Two numbers for each part that depend on all bits of its tensors, for records."""
        of_parts = [[one.detach().cpu().numpy(force=True) for one in _tensors(part)] for part in self.parts]
        return np.array([digest_of_arrays(arrays) for arrays in of_parts], np.uint64)

    def groups(self, count: int, of_each: int) -> list[Batch]:
        """Return the parts in groups of equal size, as batches; a group of one part is the part itself.

        Args:
            count: The number of groups.
            of_each: The number of parts in each.

        Raises:
            ValueError: If there are more or fewer parts.
        """
        if len(self.parts) != count * of_each:
            raise ValueError(
                f"the batch has {len(self.parts)} collated parts, but the local replicas have {count * of_each} "
                "micro-batches; give gradient_accumulation_count to distribute_dataset too, or one part for each"
            )
        if of_each == 1:
            return list(self.parts)
        starts, rows = range(0, len(self.parts), of_each), self.shape[0] // count
        return [CollatedBatch(self.parts[start : start + of_each], rows) for start in starts]

    def shortened(self, rows: Sequence[int]) -> Sequence[Batch]:
        """Return parts without padding, given the number of elements that each keeps, which is at least one."""
        if self._shortened is None or sum(rows) == self.shape[0]:
            return self.parts
        return self._shortened(rows)


def _tensors(part: Batch) -> list[torch.Tensor]:
    return [leaf for leaf in trees.leaves(part) if isinstance(leaf, torch.Tensor)]


@final
class CollatedSource(SourceFactory):
    """A data set whose batches a `collate_fn` makes.

    Args:
        source: A list of elements, another pytree of arrays or tensors, or an object with a length and `[i]`.
        collate: The function.

    Raises:
        TypeError: If the function cannot be called, or the data set has no length or no `[i]`.
    """

    def __init__(self, source: Data, collate: CollateFn) -> None:
        if not callable(collate):
            raise TypeError(f"collate_fn is a {type(collate).__name__}; give a function of a list of elements")
        is_rows = is_pytree_of_arrays(source)
        if not is_rows and not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise TypeError(
                f"collate_fn needs a data set with a length and [i], but the source is a {type(source).__name__}; "
                "give a torch.utils.data.Dataset with __len__ and __getitem__"
            )
        self._elements: RandomAccess = _RowsOfArrays(source) if is_rows else source
        self._collate = collate

    @override
    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        read = partial(self._read, len(layout.local_replicas) * layout.gradient_accumulation_count)
        length = len(self._elements)
        return RandomAccessSource(Steps(self._elements, length, layout, seed=seed, shuffle=shuffle, read=read))

    def _read(self, count: int, source: RandomAccess, epoch: int, indices: Indices) -> CollatedBatch:
        """Read a batch in `count` parts, as `Read`."""
        of_parts = np.split(indices, count)
        parts = self._parts(source, of_parts, [len(part) for part in of_parts])
        return CollatedBatch(parts, len(indices), partial(self._shortened, source, of_parts))

    def _shortened(self, source: RandomAccess, of_parts: Sequence[Indices], rows: Sequence[int]) -> list[Batch]:
        with kept_generators():  # the program's, which draws meanwhile
            return self._parts(source, of_parts, rows)

    def _parts(self, source: RandomAccess, of_parts: Sequence[Indices], rows: Sequence[int]) -> list[Batch]:
        kept = [part[: max(count, 1)].tolist() for part, count in zip(of_parts, rows, strict=True)]
        return [tensors_of(self._collate([source[index] for index in part])) for part in kept]


class _RowsOfArrays:
    """The rows of a pytree of arrays."""

    def __init__(self, arrays: Data) -> None:
        self._length, self._arrays = common_length(arrays), arrays

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Element:
        return trees.map(lambda leaf: leaf[index], self._arrays)


# ---- parts of batches


def tensors_of(batch: Batch) -> Batch:
    """Return a batch with its NumPy and JAX arrays as tensors; other leaves stay as they are."""
    return trees.map(
        lambda leaf: as_tensor(np.asarray(leaf)) if isinstance(leaf, np.ndarray) or is_jax_array(leaf) else leaf, batch
    )


def shape_of_rows(leaf: object, parts: int | None = None) -> ShapeOfArray | None:
    """Return the shape and dtype of a row of a tensor, or of one of its parts; None if the leaf is no tensor."""
    if not isinstance(leaf, torch.Tensor):
        return None
    shape = leaf.shape[1:] if parts is None else (len(leaf) // parts, *leaf.shape[1:])
    return ShapeOfArray(tuple(shape), dtype_of(leaf))


def parts_of(batch: Batch, count: int, of_each: int = 1) -> list[Batch]:
    """Cut a batch along its first axis into parts of equal size, each aligned as an allocated tensor is.

    Without the alignment, libraries may round differently.

    Args:
        batch: A pytree of tensors; other leaves go into every part.
        count: The number of parts.
        of_each: The number of micro-batches in each part, for batches that a `collate_fn` has made.

    Raises:
        ValueError: If the first axis of a tensor is not a multiple of `count`; or a collated batch has other parts.
    """
    leaves, structure = trees.flatten(batch)
    cut = [_cut(leaf, count, of_each) for leaf in leaves]
    return [trees.unflatten(structure, [parts[number] for parts in cut]) for number in range(count)]


def _cut(leaf: object, count: int, of_each: int) -> Sequence[object]:
    if isinstance(leaf, CollatedBatch):
        return [trees.map(_aligned, part) for part in leaf.groups(count, of_each)]
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * count
    if not leaf.ndim or len(leaf) % count:
        raise ValueError(
            f"a batch of shape {list(leaf.shape)} cannot be divided into {count} micro-batches of this instance; its "
            "first axis must be a multiple of their number; give ragged rows as a CollatedBatch, or give "
            "distribute_dataset a collate_fn"
        )
    return [_aligned(part) for part in ([leaf] if count == 1 else torch.tensor_split(leaf, count))]


def copied(batch: Batch) -> Batch:
    """Return a batch with copies of its tensors and mappings, because loss functions may write or empty theirs."""

    def copied_leaf(leaf: object) -> object:
        if isinstance(leaf, CollatedBatch):
            return CollatedBatch(list(map(copied, leaf.parts)), *leaf.shape)
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copy.copy(leaf) if isinstance(leaf, Mapping) else leaf

    return trees.map(copied_leaf, batch)


def _aligned(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    is_aligned = leaf.is_contiguous() and not leaf.data_ptr() % ALIGNMENT_BYTES
    return leaf if is_aligned else leaf.clone(memory_format=torch.contiguous_format)


# ---- data sets


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
    dataset = strategy.distribute_dataset(
        _of_arrays(source) if collate_fn is None else CollatedSource(_of_tensors(source), collate_fn),
        batch_size,
        seed,
        shuffle=shuffle,
        remainder=remainder,
        gradient_accumulation_count=gradient_accumulation_count,
        prefetch=prefetch,
    )
    dataset.place = lambda batch: strategy.replicas.sharding.noted(tensors_of(batch))
    return dataset


class RowOfEpoch(int):
    """The index of an element that is read in an epoch. Worker processes of a loader get it pickled.

    Attributes:
        epoch: The number of the epoch.
    """

    epoch = 0

    @classmethod
    def of(cls, index: int, epoch: int) -> RowOfEpoch:
        """Return the index of an element in an epoch."""
        row = cls(index)
        row.epoch = epoch
        return row


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
        """Return the elements of a batch, for PyTorch's loader. All are of the same epoch."""
        with seeded(self._dataset, self._seed, getattr(indices[0], "epoch", 0)) as elements:
            return [elements[int(index)] for index in indices]


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
        total, local = strategy.replicas.num_replicas_in_sync, strategy.replicas.local_replicas
        self._length = len(dataset)
        self._layout = Layout(batch_size, total, local, remainder, gradient_accumulation_count)
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
                yield RowOfEpoch.of(index, self.epoch)

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
    return trees.map(lambda leaf: as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf, _of_tensors(source))
