"""The exchange of gradients that lie on a device: the interface between an engine and the path of its gradients.

Each instance adds the gradients of its replicas on the device, as far as the tree allows (`collectives.tree.subtrees`).
A path turns these sums into the means over all replicas. Every path gives the same bits as the exchange on the host.
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
"""A flat array on a device, of the engine's framework. The device may still be computing it."""

AUTO, COMPILED, WINDOW, HOST = "auto", "compiled", "window", "host"
EXCHANGES = (AUTO, COMPILED, WINDOW, HOST)
"""The exchanges: chosen by the instances' devices; compiled collectives; windows on devices; through the host."""


class DeviceArithmetic(Protocol):
    """The arithmetic of a framework on its devices, with the same bits as `collectives.reduction.Reduction`.

    A path calls it. No method waits for the device. After an error the sums may be used up.
    """

    def mean(
        self, nodes: Sequence[TreeNode], sums: Sequence[DeviceArray], dtype: np.dtype, replicas: int
    ) -> DeviceArray:
        """Return the mean: the sum of nodes that form the whole tree, divided once by R, rounded once to `dtype`.

        Args:
            nodes: Neighbouring nodes in order; together they are the root.
            sums: Sums of these nodes; the call may reuse their memory. The sum of a single replica may have the narrow
                dtype in which it travels.
            dtype: Dtype of the mean.
            replicas: R.
        """

    def means(
        self,
        nodes: Sequence[TreeNode],
        sums: Sequence[Sequence[DeviceArray]],
        dtypes: Sequence[np.dtype],
        replicas: int,
    ) -> Sequence[DeviceArray]:
        """Return the means of several buffers, each as `mean` returns it.

        Args:
            nodes: Neighbouring nodes in order; together they are the root.
            sums: Sums of all buffers, for each node.
            dtypes: Dtypes of the means.
            replicas: R.
        """


class DeviceViews(Protocol):
    """The memory behind a framework's arrays, for paths that copy by themselves."""

    def view(self, array: ExportedArray) -> DeviceArray:
        """Return an array that views memory of the path, without a copy.

        A path makes a new view after each change of that memory, and gives views only to the framework's programs.
        """

    def addresses(self, arrays: Sequence[DeviceArray]) -> list[int]:
        """Wait until contiguous arrays have been computed, and return their addresses."""

    def dtype_of(self, array: DeviceArray) -> np.dtype:
        """Return the NumPy dtype of an array."""

    def taken(self, view: DeviceArray, starts: Sequence[int], sizes: Sequence[int]) -> list[DeviceArray]:
        """Wait for, and return, copies of parts of a flat view; no copy shares the view's memory.

        Args:
            view: Array that `view` returned.
            starts: First elements of the parts.
            sizes: Sizes of the parts in elements.
        """

    def stacked(self, rows: Sequence[DeviceArray]) -> DeviceArray:
        """Wait for, and return, a copy of flat views, stacked along a new first axis."""


class DevicePath(ABC):
    """A path on which sums on devices become means over all replicas of all instances.

    A step calls `means` and `gather` in the same order on all instances. If a call fails, the sums may be used up, and
    other instances may still wait in it, up to the communicator's time limit. Then only `close` may follow; after a
    loss the survivors make a new path.

    Args:
        spread: Spread of the replicas over the instances; `spread.sums` has the nodes that each instance adds itself.
        rank: Rank of this instance.
    """

    word: ClassVar[str]
    """One of `EXCHANGES`."""

    def __init__(self, spread: Spread, rank: int) -> None:
        self.spread = spread
        self.rank = rank

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """The nodes whose sums this instance contributes."""
        return self.spread.sums[self.rank]

    @abstractmethod
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        """Return the mean of each buffer of a bucket. Collective. The call need not wait for the device.

        The caller has compared the layouts of the instances.

        Args:
            name: Name of the bucket.
            sums: Sums of `nodes` for each buffer: flat, of equal length, and of the accumulators' dtype. The sum of a
                single replica may have the dtype in which it travels. The call may reuse their memory. A buffer may be
                empty.
            dtypes: Dtype of each buffer's mean, in which gradients travel.
        """

    @abstractmethod
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        """Return the flat arrays of all instances, of equal size, as one row for each instance. Collective.

        Args:
            name: Name of the collective.
            own: Array of this instance.
        """

    def close(self) -> None:  # noqa: B027  # most paths have nothing to give back
        """Release the memory of the path. Not collective. No other method may be called afterwards."""
