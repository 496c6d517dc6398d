"""The path of gradients where one instance has all replicas: nothing leaves the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from collectives.plans.spread import Spread
from strategies.exchange.choice import LOCAL
from strategies.exchange.on_device import DeviceArithmetic, DevicePath


@final
class TorchLocalPath(DevicePath):
    """A path of one instance, whatever the exchange between instances would be.

    Args:
        replicas: R.
        arithmetic: adds and divides.
    """

    word = LOCAL

    def __init__(self, replicas: int, arithmetic: DeviceArithmetic) -> None:
        super().__init__(Spread.apart((replicas,)), 0)
        self._arithmetic = arithmetic

    def means(
        self, name: str, sums: Sequence[Sequence[torch.Tensor]], dtypes: Sequence[np.dtype]
    ) -> Sequence[torch.Tensor]:
        """See `DevicePath`."""
        pairs = zip(sums, dtypes, strict=True)
        return [self._arithmetic.mean(self.nodes, each, dtype, self.spread.replicas) for each, dtype in pairs]

    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """See `DevicePath`: one row."""
        return own.reshape(1, -1)
