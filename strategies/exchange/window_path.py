"""The exchange through windows: each instance of a host adds one slice of the sums of all instances.

Each instance copies its sums into its own window. When all have done that, instance j makes the mean of slice j
straight from all windows, in the order of the tree. It copies the mean into all windows. When all have done that, each
instance takes the means out of its own window. For S bytes of gradients an instance copies 2 S and reads S, and the
ranks meet twice, however many they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import final

import numpy as np
from typing_extensions import override

from collectives import Communicator
from collectives.errors import MappingError
from collectives.mapped import Copied, MappedMemory
from collectives.plans.spread import Spread
from strategies.exchange.on_device import WINDOW, DeviceArithmetic, DeviceArray, DevicePath, DeviceViews
from strategies.exchange.window_layout import WindowLayout
from strategies.exchange.windows import Windows, share_windows

logger = logging.getLogger("strategies.exchange")

_LEAST_BYTES = 1 << 16
"""The size of the first window, which shows whether the instances can map each other's memory."""


def windows_if_possible(asked: str, make: Callable[[], WindowPath]) -> WindowPath | None:
    """Return a path through windows, or None if the instances cannot map each other's memory. Collective.

    Args:
        asked: Exchange that the job asks for, one of `EXCHANGES`.
        make: Function that makes the path.

    Raises:
        MappingError: The job asks for windows, and the instances cannot map each other's memory.
    """
    try:
        return make()
    except MappingError as error:
        if asked == WINDOW:
            raise
        logger.warning("gradients go through the host: %s", error)
        return None


@final
class WindowPath(DevicePath):
    """The path through memory that the instances of a host map. Making a path is a collective call.

    The caller owns the arrays that `means` and `gather` return: the path neither writes nor reads them later. Both
    methods wait for the device.

    Args:
        spread: Spread of the replicas over the instances, all on one host.
        communicator: Communicator of the instances.
        memory: Memory of the device on which this instance adds; the path closes it, also if making the path fails.
        arithmetic: Arithmetic of the engine's framework.
        views: Views of the same framework.

    Raises:
        MappingError: The instances cannot map each other's memory; all raise it.
    """

    word = WINDOW

    def __init__(
        self,
        spread: Spread,
        communicator: Communicator,
        memory: MappedMemory,
        arithmetic: DeviceArithmetic,
        views: DeviceViews,
    ) -> None:
        super().__init__(spread, communicator.rank)
        self._communicator = communicator
        self._memory = memory
        self._arithmetic = arithmetic
        self._views = views
        self._all_nodes = [node for nodes in spread.sums for node in nodes]
        self._layout = lru_cache(64)(lambda sizes, dtypes: WindowLayout(spread, sizes, dtypes))
        try:
            self._windows = share_windows(communicator, memory, _LEAST_BYTES)
        except BaseException:
            memory.close()
            raise

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        layout = self._layout(tuple(of_buffer[0].shape[0] for of_buffer in sums), tuple(dtypes))
        windows = self._windows_of(layout.nbytes)
        self._put(layout, windows, sums)
        self._communicator.barrier(name=f"{name}: sums are in windows")
        for number in range(len(layout.groups)):
            self._reduce(layout, windows, number)
        self._communicator.barrier(name=f"{name}: means are in windows")
        return self._taken(layout, windows, dtypes)

    @override
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        dtype, shape = self._views.dtype_of(own), (own.shape[0],)
        nbytes = shape[0] * dtype.itemsize
        windows = self._windows_of(nbytes)
        self._memory.copy([Copied(windows.own.address, self._views.addresses([own])[0], nbytes)])
        self._communicator.barrier(name=f"{name}: rows are in windows")
        rows = [self._views.view(windows.of(rank).array(shape, dtype)) for rank in range(self.spread.size)]
        gathered = self._views.stacked(rows)
        self._communicator.barrier(name=f"{name}: rows have been read")
        return gathered

    @override
    def close(self) -> None:
        self._windows.close()
        self._memory.close()

    def _windows_of(self, nbytes: int) -> Windows:
        """Return windows of at least that size. Collective if larger windows have to be made."""
        if nbytes > self._windows.nbytes:
            self._windows.unmap()
            self._communicator.barrier(name="windows are unmapped")
            self._windows.close()
            self._windows = share_windows(self._communicator, self._memory, nbytes)
        return self._windows

    def _put(self, layout: WindowLayout, windows: Windows, sums: Sequence[Sequence[DeviceArray]]) -> None:
        """Wait until this instance's sums have been computed, and copy them into its window."""
        arrays: list[DeviceArray] = []
        places: list[tuple[int, int]] = []
        for of_nodes, group in zip(layout.sums[self.rank], layout.groups, strict=True):
            for buffer, start, size in zip(group.numbers, group.starts, group.sizes, strict=True):
                arrays += sums[buffer]
                places += [(windows.own.address + one.at(start), size * one.dtype.itemsize) for one in of_nodes]
        sources = self._views.addresses(arrays)
        self._memory.copy([Copied(to, source, nbytes) for (to, nbytes), source in zip(places, sources, strict=True)])

    def _reduce(self, layout: WindowLayout, windows: Windows, number: int) -> None:
        """Make the mean of this instance's slice of a group, and copy it into all windows."""
        group = layout.groups[number]
        first, stop = layout.slice_of(group, self.rank)
        if first == stop:
            return
        shape = (stop - first,)
        sources = [
            self._views.view(windows.of(rank).array(shape, place.dtype, place.at(first)))
            for rank in range(self.spread.size)
            for place in layout.sums[rank][number]
        ]
        mean = self._arithmetic.mean(self._all_nodes, sources, group.reduction.dtype, self.spread.replicas)
        (source,), nbytes = self._views.addresses([mean]), shape[0] * group.reduction.dtype.itemsize
        places = [windows.of(rank).address + layout.means[rank][number].at(first) for rank in range(self.spread.size)]
        self._memory.copy([Copied(to, source, nbytes) for to in places if to != source])

    def _taken(self, layout: WindowLayout, windows: Windows, dtypes: Sequence[np.dtype]) -> list[DeviceArray]:
        """Return copies of the means of all buffers; only copies may be given to programs of users."""
        found: list[DeviceArray] = [None] * len(dtypes)
        for place in layout.means[self.rank]:
            group = place.together
            view = self._views.view(windows.own.array((group.elements,), place.dtype, place.start))
            for number, mean in zip(group.numbers, self._views.taken(view, group.starts, group.sizes), strict=True):
                found[number] = mean
        for number, dtype in enumerate(dtypes):
            if found[number] is None:
                empty = self._views.view(windows.own.array((0,), dtype))
                (found[number],) = self._views.taken(empty, (0,), (0,))
        return found
