"""The path of gradients for an instance that exchanges none: nothing leaves the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from typing_extensions import override

from collectives.plans.spread import Spread
from collectives.tree import TreeNode, halves, root_of, subtrees
from strategies.exchange.choice import LOCAL
from strategies.exchange.on_device import DeviceArithmetic, DeviceArray, DevicePath


@final
class LocalPath(DevicePath):
    """The path of a job of one instance; the last addition and the division are one operation.

    A spare that rehearses a step alone has some of the replicas. The "means" of its path have the right shapes and
    dtypes, and no meaning.

    Args:
        replicas: R.
        arithmetic: Arithmetic that adds and divides.
        own: Replicas of this instance; None for all.
    """

    word = LOCAL

    def __init__(self, replicas: int, arithmetic: DeviceArithmetic, own: range | None = None) -> None:
        super().__init__(Spread.together([replicas]), 0)
        self._arithmetic = arithmetic
        self._own = range(replicas) if own is None else own

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """The terms of the last addition: the halves of the tree, or the root if there is one replica.

        On a spare, the nodes that it would add up.
        """
        root = root_of(self.spread.replicas)
        if len(self._own) < self.spread.replicas:
            return subtrees(self._own.start, self._own.stop, self.spread.replicas)
        return (root,) if root.is_leaf else halves(root)

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        if self.spread.replicas == 1:
            return [of_buffer[0] for of_buffer in sums]
        if len(self._own) < self.spread.replicas:
            return [of_buffer[0].astype(dtype) for of_buffer, dtype in zip(sums, dtypes, strict=True)]
        return self._arithmetic.means(self.nodes, list(zip(*sums, strict=True)), dtypes, self.spread.replicas)

    @override
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        return own[None]
