"""Loss scaling: keeps small gradients of low-precision programs above zero, and skips steps that overflow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from strategies.argument_checks import positive
from strategies.typing import Scalar

MOST = 2.0**24
"""No loss is scaled by more."""


@dataclass(frozen=True)
class LossScale:
    """The state of loss scaling after a step, the same on all instances.

    Attributes:
        scale: what the next loss is multiplied with; float32.
        good_steps: since the scale changed; int32.
        skipped: steps that were not applied since training began; int32.
    """

    scale: Scalar
    good_steps: Scalar
    skipped: Scalar

    def __str__(self) -> str:
        return f"{float(self.scale):g}"


@dataclass(frozen=True)
class LossScaling:
    """Multiplies the loss before the backward pass, and divides the mean gradients by the same number.

    A step whose gradients are not finite on any replica is not applied on all of them.

    Attributes:
        initial: the first scale; powers of two change no bit of what does not overflow.
        factor: after `interval` steps without overflow the scale is multiplied with it; with each overflow it is
            divided by it, down to 1. 1 for a scale that stays.
        interval: see there.

    Raises:
        TypeError: if `interval` is not an integer.
        ValueError: if a number is out of range.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    interval: int = 2000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.initial) and 0 < self.initial <= MOST):
            raise ValueError(f"the loss scale is {self.initial}; it is above 0 and at most 2**24")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"the factor of the loss scale is {self.factor}; it is at least 1, which keeps the scale")
        positive("the interval of the loss scale", self.interval)

    @classmethod
    def parse(cls, scaling: object) -> LossScaling | None:
        """None, "dynamic", a number for a scale that stays, or a `LossScaling`."""
        if scaling is None or isinstance(scaling, cls):
            return scaling
        if scaling == "dynamic":
            return cls()
        if isinstance(scaling, int | float) and not isinstance(scaling, bool):
            return cls(float(scaling), 1.0)
        raise ValueError(f"loss_scaling is {scaling!r}; use None, 'dynamic', a number or a LossScaling")

    def start(self) -> LossScale:
        """Before the first step."""
        return LossScale(np.float32(self.initial), np.int32(0), np.int32(0))

    def after(self, last: LossScale, is_finite: bool) -> LossScale:
        """After a step whose gradients were finite, or not."""
        scale, good = np.float32(last.scale), int(last.good_steps) + 1
        if not is_finite:
            lower = max(float(scale) / self.factor, min(1.0, self.initial))
            return LossScale(np.float32(lower), np.int32(0), np.int32(int(last.skipped) + 1))
        if good >= self.interval and self.factor > 1:
            return LossScale(np.float32(min(float(scale) * self.factor, MOST)), np.int32(0), last.skipped)
        return LossScale(scale, np.int32(good), last.skipped)
