"""The path of gradients for one instance that has all replicas: nothing leaves the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from typing_extensions import override

from collectives.plans.spread import Spread
from collectives.tree import TreeNode, halves, root_of
from strategies.exchange.choice import LOCAL
from strategies.exchange.on_device import DeviceArithmetic, DeviceArray, DevicePath


@final
class LocalPath(DevicePath):
    """The path of a job of one instance; the last addition and the division are one operation.

    Args:
        replicas: R.
        arithmetic: Arithmetic that adds and divides.
    """

    word = LOCAL

    def __init__(self, replicas: int, arithmetic: DeviceArithmetic) -> None:
        super().__init__(Spread.together([replicas]), 0)
        self._arithmetic = arithmetic

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """The terms of the last addition: the halves of the tree, or the root if there is one replica."""
        root = root_of(self.spread.replicas)
        return (root,) if root.is_leaf else halves(root)

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        if self.spread.replicas == 1:
            return [of_buffer[0] for of_buffer in sums]
        return self._arithmetic.means(self.nodes, list(zip(*sums, strict=True)), dtypes, self.spread.replicas)

    @override
    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        return own[None]
