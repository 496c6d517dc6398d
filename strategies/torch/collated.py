"""Batches that a `collate_fn` makes of the elements of each micro-batch, of any structure and with unequal shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

import numpy as np
import torch
from typing_extensions import override

import strategies.trees as trees
from strategies.core.digest import digest_of_arrays
from strategies.data.datasets import is_pytree_of_arrays
from strategies.data.layout import Indices, Layout
from strategies.data.randomness import kept_generators
from strategies.data.sources import (
    DataSource,
    RandomAccess,
    RandomAccessSource,
    SourceFactory,
    Steps,
    common_length,
)
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
        convert: Function that converts the arrays of a part.

    Raises:
        TypeError: If the function cannot be called, or the data set has no length or no `[i]`.
    """

    def __init__(self, source: Data, collate: CollateFn, convert: Callable[[Batch], Batch]) -> None:
        if not callable(collate):
            raise TypeError(f"collate_fn is a {type(collate).__name__}; give a function of a list of elements")
        is_rows = is_pytree_of_arrays(source)
        if not is_rows and not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise TypeError(
                f"collate_fn needs a data set with a length and [i], but the source is a {type(source).__name__}; "
                "give a torch.utils.data.Dataset with __len__ and __getitem__"
            )
        self._elements: RandomAccess = _RowsOfArrays(source) if is_rows else source
        self._collate, self._convert = collate, convert

    @override
    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        count = len(layout.local_replicas) * layout.gradient_accumulation_count
        read = _Collation(self._collate, self._convert, count)
        length = len(self._elements)
        return RandomAccessSource(Steps(self._elements, length, layout, seed=seed, shuffle=shuffle, read=read))


class _RowsOfArrays:
    """The rows of a pytree of arrays."""

    def __init__(self, arrays: Data) -> None:
        self._length, self._arrays = common_length(arrays), arrays

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Element:
        return trees.map(lambda leaf: leaf[index], self._arrays)


@dataclass(frozen=True)
class _Collation:
    """The reading of a batch.

    Attributes:
        collate: The function that makes a part.
        convert: The function that converts its arrays.
        count: The number of parts.
    """

    collate: CollateFn
    convert: Callable[[Batch], Batch]
    count: int

    def __call__(self, source: RandomAccess, epoch: int, indices: Indices) -> CollatedBatch:
        """Read a batch, as `Read`."""
        parts = self._parts(source, indices, [len(indices) // self.count] * self.count)
        return CollatedBatch(parts, len(indices), partial(self._shortened, source, indices))

    def _shortened(self, source: RandomAccess, indices: Indices, rows: Sequence[int]) -> list[Batch]:
        with kept_generators():  # the program's, which draws meanwhile
            return self._parts(source, indices, rows)

    def _parts(self, source: RandomAccess, indices: Indices, rows: Sequence[int]) -> list[Batch]:
        of_parts = zip(np.split(indices, self.count), rows, strict=True)
        return [self._part(source, part[: max(count, 1)]) for part, count in of_parts]

    def _part(self, source: RandomAccess, indices: Indices) -> Batch:
        return self.convert(self.collate([source[int(index)] for index in indices]))
