"""Data sets as one instance sees them; this file has the interface and the kind that holds arrays."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from strategies.data.layout import Layout, epoch_order
from strategies.per_replica import PerReplica
from strategies.typing import Batch, Element, Tree


class Masked(NamedTuple):
    """A batch of a data set that pads.

    Attributes:
        values: the batch, leaves of shape `[local_replicas * gradient_accumulation_count * batch_size, ...]`.
        mask: bool, a number for each element, False where an element was repeated to fill the batch.
    """

    values: Batch
    mask: NDArray[np.bool_]


class DataSource(ABC):
    """One instance's share of a data set.

    Attributes:
        is_random_access: whether the batch of any step can be read for any replicas, and every instance knows
            without asking the others how many steps there are.
        length: elements of the whole data set, None when unknown.
        steps: steps per epoch, the same on every instance; None when unknown before the end of an epoch.
    """

    is_random_access: ClassVar[bool] = False
    length: int | None
    steps: int | None

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        """Yields the batches of steps `start`, `start + 1`, ... of an epoch; no array is ever reused."""


class SourceFactory(ABC):
    """A data set that opens its source itself."""

    @abstractmethod
    def open(self, layout: Layout, *, seed: int, shuffle: bool) -> DataSource:
        """The local replicas' share.

        Raises:
            ValueError: if it does not fill a step.
        """


class ArraySource(DataSource):
    """A pytree of arrays that share their leading length; a step gathers the local replicas' rows."""

    is_random_access = True

    def __init__(self, arrays: Tree, layout: Layout, *, seed: int, shuffle: bool) -> None:
        self._arrays = jax.tree.map(np.asarray, arrays)
        self._layout = layout
        self._seed = seed
        self._shuffle = shuffle
        self.length: int = common_length(self._arrays)
        layout.check_length(self.length)
        self.steps: int = layout.steps(self.length)

    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        """See `DataSource`."""
        order = epoch_order(self.length, self._seed, epoch, shuffle=self._shuffle)
        for step in range(start, self.steps):
            positions = self._layout.positions(step, self.length)
            values = self._rows(order[positions % self.length])
            yield Masked(values, positions < self.length) if self._layout.pads else values

    def _rows(self, indices: NDArray[np.int64]) -> Batch:
        return jax.tree.map(lambda array: array.take(indices, axis=0), self._arrays)


def stacked(elements: Sequence[Element]) -> Batch:
    """Elements as one batch; ValueError when they differ in structure or shapes, or are several replicas'."""
    if any(isinstance(leaf, PerReplica) for leaf in jax.tree.leaves(elements[0])):
        raise ValueError(
            "the elements are PerReplica, and each is for one replica; give distribute_dataset one PerReplica, with an "
            "iterable for each local replica"
        )
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *elements)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"elements cannot be stacked into a batch ({error}); all need the same structure and shapes"
        ) from error


def common_length(arrays: Tree) -> int:
    """The leading length that all leaves share; ValueError, naming the leaves, where there is none."""
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        name = f"data set{jax.tree_util.keystr(path)}"
        if leaf.dtype == object:
            raise ValueError(f"{name} holds Python objects; arrays of numbers are needed")
        if leaf.ndim == 0:
            raise ValueError(f"{name} is a scalar; every leaf needs a leading axis that runs over the elements")
        lengths[name] = leaf.shape[0]
    if not lengths:
        raise ValueError("the data set has no arrays; at least one is needed")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"arrays differ in the number of elements: {listed}; all must have the same")
    return next(iter(lengths.values()))
