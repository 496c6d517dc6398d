"""The exchange of gradients that lie on a device: the interface between an engine and the path that they take.

Each instance adds the gradients of its replicas on the device, as far as the tree allows (`collectives.tree.subtrees`).
A path makes the means over all replicas of these sums. Every path gives the bits of the exchange on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from collectives.dlpack import ExportedArray
from collectives.plans.spread import Spread
from collectives.tree import TreeNode
from strategies.typing import Leaf

DeviceArray: TypeAlias = Leaf
"""A flat array on a device, of the engine's framework. The device may still compute it."""

AUTO, COMPILED, WINDOW, HOST = "auto", "compiled", "window", "host"
EXCHANGES = (AUTO, COMPILED, WINDOW, HOST)
"""The words for an exchange: as the instances' devices allow; compiled collectives; windows on devices; the host."""


class DeviceArithmetic(Protocol):
    """The arithmetic of a framework on its devices, with the bits of `collectives.reduction.Reduction`.

    Nothing waits for the device.
    """

    def mean(
        self, nodes: Sequence[TreeNode], sums: Sequence[DeviceArray], dtype: np.dtype, replicas: int
    ) -> DeviceArray:
        """Return the sum of neighbours that are the whole tree, divided once by the replicas, rounded once to a dtype.

        Args:
            nodes: in order; together they are the root.
            sums: of these nodes, which may be used up. That of one replica may have the narrow dtype in which it
                travels.
            dtype: of the mean.
            replicas: R.
        """

    def means(
        self,
        nodes: Sequence[TreeNode],
        sums: Sequence[Sequence[DeviceArray]],
        dtypes: Sequence[np.dtype],
        replicas: int,
    ) -> Sequence[DeviceArray]:
        """Return the mean of each buffer, see `mean`.

        Args:
            nodes: see `mean`.
            sums: for each node those of all buffers.
            dtypes: of the means.
            replicas: R.
        """


class DeviceViews(Protocol):
    """The memory behind a framework's arrays, for paths that copy on their own."""

    def view(self, array: ExportedArray) -> DeviceArray:
        """Return an array in memory of the path, nothing copied.

        It is imported anew after each change of that memory, and handed to the framework's programs only.
        """

    def addresses(self, arrays: Sequence[DeviceArray]) -> list[int]:
        """Wait until contiguous arrays have been computed, and return where they begin."""

    def dtype_of(self, array: DeviceArray) -> np.dtype:
        """Return the dtype of an array, as NumPy has it."""

    def taken(self, view: DeviceArray, starts: Sequence[int], sizes: Sequence[int]) -> list[DeviceArray]:
        """Return copies of parts of a flat view, once they have been made; none of them lies in the view's memory.

        Args:
            view: see `view`.
            starts: the elements where parts begin.
            sizes: of the parts, in elements.
        """

    def stacked(self, rows: Sequence[DeviceArray]) -> DeviceArray:
        """Return a copy of flat views, one behind the other along a new first axis, once it has been made."""


class DevicePath(ABC):
    """A path on which sums that lie on devices become means over all replicas of all instances.

    Args:
        spread: of the replicas over the instances; `spread.sums` has the nodes that each instance adds by itself.
        rank: of this instance.
    """

    word: ClassVar[str]
    """One of `EXCHANGES`."""

    def __init__(self, spread: Spread, rank: int) -> None:
        self.spread = spread
        self.rank = rank

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """The nodes whose sums this instance gives."""
        return self.spread.sums[self.rank]

    @abstractmethod
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        """Return the mean of each buffer of a bucket. Collective; need not wait for the device.

        The layouts of the instances have been compared before.

        Args:
            name: of the bucket.
            sums: for each buffer those of `nodes`, flat, all of the same length and of the accumulators' dtype (or, of
                a single replica, in the dtype in which it travels). They may be used up. A buffer may be empty.
            dtypes: of the mean of each buffer, in which gradients travel.
        """

    @abstractmethod
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        """Return the flat arrays of all instances, of equal size, one row for each instance. Collective.

        Args:
            name: of the collective.
            own: of this instance.
        """

    def close(self) -> None:  # noqa: B027  # most paths have nothing to give back
        """Give back the memory of the path; no collective call. The path must not be used any more."""
