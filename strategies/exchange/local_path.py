"""The path of gradients where one instance has all replicas: nothing leaves the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from collectives.plans.spread import Spread
from collectives.tree import TreeNode, halves, root_of
from strategies.exchange.choice import LOCAL
from strategies.exchange.on_device import DeviceArithmetic, DeviceArray, DevicePath


@final
class LocalPath(DevicePath):
    """A path of one instance, which makes the last addition together with the division.

    Args:
        replicas: R.
        arithmetic: adds and divides.
    """

    word = LOCAL

    def __init__(self, replicas: int, arithmetic: DeviceArithmetic) -> None:
        super().__init__(Spread.together([replicas]), 0)
        self._arithmetic = arithmetic

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """See `DevicePath`: what the last addition adds."""
        root = root_of(self.spread.replicas)
        return (root,) if root.is_leaf else halves(root)

    def means(
        self, name: str, sums: Sequence[Sequence[DeviceArray]], dtypes: Sequence[np.dtype]
    ) -> Sequence[DeviceArray]:
        """See `DevicePath`."""
        if self.spread.replicas == 1:
            return [of_buffer[0] for of_buffer in sums]
        return self._arithmetic.means(self.nodes, list(zip(*sums, strict=True)), dtypes, self.spread.replicas)

    def gather(self, name: str, own: DeviceArray) -> DeviceArray:
        """See `DevicePath`."""
        return own[None]
