"""Data sets whose elements can be read one by one in any order."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeAlias

from strategies.data.layout import Indices, Layout, epoch_order
from strategies.data.sources import DataSource, Masked, stacked
from strategies.typing import Batch, Element


class RandomAccess(Protocol):
    """What has a length and can be asked for element i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Element: ...


ReadElement: TypeAlias = Callable[[RandomAccess, int, int], Element]
"""(elements, epoch, index) -> the element as it is in that epoch; can be pickled."""


def same_in_every_epoch(source: RandomAccess, epoch: int, index: int) -> Element:
    """Read an element of an object with `[i]`."""
    return source[index]


class Steps:
    """What the local replicas take at every step of all epochs, counted from step 0 of epoch 0.

    It can be pickled; processes that read different steps of one data set need nothing else, and agree.

    Raises:
        ValueError: if the elements do not fill one step.
    """

    def __init__(
        self, source: RandomAccess, layout: Layout, *, seed: int, shuffle: bool, read: ReadElement = same_in_every_epoch
    ) -> None:
        self.length = len(source)
        layout.check_length(self.length)
        self.per_epoch = layout.steps(self.length)
        self._source = source
        self._read = read
        self._layout = layout
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, Indices] | None = None

    def read(self, number: int) -> Batch:
        """Return the batch of step `number % per_epoch` of epoch `number // per_epoch`."""
        epoch, step = divmod(number, self.per_epoch)
        order = self._order_of(epoch)
        positions = self._layout.positions(step, self.length)
        values = stacked([self._read(self._source, epoch, int(i)) for i in order[positions % self.length]])
        return Masked(values, positions < self.length) if self._layout.pads else values

    def _order_of(self, epoch: int) -> Indices:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.length, self._seed, epoch, shuffle=self._shuffle))
        return self._order[1]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_order": None}


class RandomAccessSource(DataSource):
    """Elements that are read in this process, when their batch is asked for."""

    is_random_access = True

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.length: int = steps.length
        self.steps: int = steps.per_epoch

    def batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        """See `DataSource`."""
        for step in range(start, self.steps):
            yield self._steps.read(epoch * self.steps + step)
