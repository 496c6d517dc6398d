"""The layout of a bucket in windows: the sums of each instance, and the means of all instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from collectives.plans.spread import Spread
from collectives.reduction import Reduction
from collectives.shared_memory.reduction import slice_bounds
from collectives.tree import TreeNode

ALIGNMENT_BYTES = 256
"""XLA reads memory in place from multiples of 64 bytes (CPUs) or 256 (GPUs)."""


@dataclass(frozen=True)
class Together:
    """Buffers of one dtype, placed one after another, so that one program makes all of their means.

    Attributes:
        reduction: Mean of arrays of this dtype.
        numbers: Numbers of the buffers in the bucket, without empty ones.
        sizes: Sizes of these buffers in elements.
    """

    reduction: Reduction
    numbers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def alignment(self) -> int:
        """The alignment in elements: each buffer begins at a multiple of it."""
        return ALIGNMENT_BYTES // self.reduction.dtype.itemsize

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        lengths = (-(-size // self.alignment) * self.alignment for size in self.sizes)
        return tuple(accumulate(lengths, initial=0))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each buffer."""
        return self._bounds[:-1]

    @property
    def elements(self) -> int:
        """The number of elements of all buffers, with the gaps between them."""
        return self._bounds[-1]

    def bytes_of(self, node: TreeNode) -> int:
        """Return the size in bytes of the sums of a node."""
        return self.elements * self.reduction.dtype_of(node).itemsize


@dataclass(frozen=True)
class Place:
    """The place of an array in a window.

    Attributes:
        together: Buffers that lie there.
        start: Byte at which the array begins.
        dtype: Dtype of its elements.
    """

    together: Together
    start: int
    dtype: np.dtype

    def at(self, element: int) -> int:
        """Return the byte at which an element begins."""
        return self.start + element * self.dtype.itemsize


class WindowLayout:
    """The layout of a bucket in the window of every instance, the same on all instances.

    If a mean is as wide as the first sum, it takes the sum's place: no other instance reads the slice that an instance
    adds.

    Args:
        spread: Spread of the replicas over the instances.
        sizes: Sizes of the buffers in elements.
        dtypes: Dtypes of the means.

    Attributes:
        groups: Non-empty buffers, grouped by dtype.
        sums: Places of an instance's nodes, for each instance and group.
        means: Place of the means, for each instance and group.
        nbytes: Size of the largest window in bytes.
    """

    def __init__(self, spread: Spread, sizes: Sequence[int], dtypes: Sequence[np.dtype]) -> None:
        self.groups = tuple(_groups(sizes, dtypes))
        self.sums: list[list[list[Place]]] = []
        self.means: list[list[Place]] = []
        self.nbytes = 0
        in_place = [all(_is_narrow(group, nodes[0]) for nodes in spread.sums) for group in self.groups]
        for nodes in spread.sums:
            end = 0
            of_sums, of_means = [], []
            for group, is_in_place in zip(self.groups, in_place, strict=True):
                lengths = [group.bytes_of(node) for node in nodes]
                *starts, end = accumulate(lengths, initial=end)
                places = zip(starts, nodes, strict=True)
                of_sums.append([Place(group, start, group.reduction.dtype_of(node)) for start, node in places])
                dtype = group.reduction.dtype
                of_means.append(Place(group, starts[0] if is_in_place else end, dtype))
                end += 0 if is_in_place else group.elements * dtype.itemsize
            self.sums.append(of_sums)
            self.means.append(of_means)
            self.nbytes = max(self.nbytes, end)
        self._instances = spread.size

    def slice_of(self, group: Together, rank: int) -> tuple[int, int]:
        """Return the slice of a group whose mean an instance makes, as (first element, end)."""
        bounds = slice_bounds(group.elements, self._instances, group.alignment)
        return bounds[rank], bounds[rank + 1]


def _groups(sizes: Sequence[int], dtypes: Sequence[np.dtype]) -> Iterator[Together]:
    for dtype in dict.fromkeys(dtypes):
        numbers = tuple(number for number, own in enumerate(dtypes) if own == dtype and sizes[number])
        if numbers:
            yield Together(Reduction("mean", dtype), numbers, tuple(sizes[number] for number in numbers))


def _is_narrow(group: Together, node: TreeNode) -> bool:
    return group.reduction.dtype_of(node) == group.reduction.dtype
