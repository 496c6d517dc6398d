"""Loss scaling (Micikevicius et al., 2018): keep small low-precision gradients above zero, skip overflowing steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from strategies.argument_checks import positive
from strategies.typing import Scalar

MOST = 2.0**24
"""The largest scale."""


@dataclass(frozen=True)
class LossScale:
    """The state of loss scaling after a step, the same on all instances.

    Attributes:
        scale: Factor of the next loss, float32.
        good_steps: Number of steps since the scale last changed, int32.
        skipped: Number of steps that were not applied since training began, int32.
    """

    scale: Scalar
    good_steps: Scalar
    skipped: Scalar

    def __str__(self) -> str:
        return f"{float(self.scale):g}"

    def kept(self) -> LossScale:
        """Return the state after a step that was skipped for another reason than its gradients."""
        return replace(self, skipped=np.int32(int(self.skipped) + 1))


@dataclass(frozen=True)
class LossScaling:
    """The rule of loss scaling (Micikevicius et al., "Mixed Precision Training", 2018).

    The loss is multiplied by the scale before the backward pass, and the mean gradients are divided by it. If a
    gradient is not finite on any replica, no replica applies the step, and the scale is divided by `factor`.

    Example::

        trainer = strategies.Trainer(strategy, loss_fn, optimizer, compute_dtype="float16",
                                     loss_scaling=strategies.LossScaling(initial=2.0**12, interval=500))

    Attributes:
        initial: First scale, above 0 and at most 2**24. A power of two changes no bit of gradients that do not
            overflow.
        factor: After `interval` steps without overflow the scale is multiplied by `factor`. Each overflow divides it
            by `factor`, down to 1. A factor of 1 keeps the scale constant.
        interval: Number of steps without overflow before the scale grows.

    Raises:
        TypeError: If `interval` is not an integer.
        ValueError: If a number is out of range.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    interval: int = 2000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.initial) and 0 < self.initial <= MOST):
            raise ValueError(f"the loss scale is {self.initial}; it must be above 0 and at most 2**24")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"the factor of the loss scale is {self.factor}; it must be at least 1 (1: constant)")
        positive("the interval of the loss scale", self.interval)

    @classmethod
    def parse(cls, scaling: object) -> LossScaling | None:
        """Return the rule for None, "dynamic", a number (a constant scale) or a `LossScaling`; None without scaling."""
        if scaling is None or isinstance(scaling, cls):
            return scaling
        if scaling == "dynamic":
            return cls()
        if isinstance(scaling, int | float) and not isinstance(scaling, bool):
            return cls(float(scaling), 1.0)
        raise ValueError(f"loss_scaling is {scaling!r}; use None, 'dynamic', a number or a LossScaling")

    def start(self) -> LossScale:
        """Return the state before the first step."""
        return LossScale(np.float32(self.initial), np.int32(0), np.int32(0))

    def after(self, last: LossScale, is_finite: bool) -> LossScale:
        """Return the state after a step, given whether its gradients were finite."""
        scale, good = np.float32(last.scale), int(last.good_steps) + 1
        if not is_finite:
            lower = max(float(scale) / self.factor, min(1.0, self.initial))
            return LossScale(np.float32(lower), np.int32(0), np.int32(int(last.skipped) + 1))
        if good >= self.interval and self.factor > 1:
            return LossScale(np.float32(min(float(scale) * self.factor, MOST)), np.int32(0), last.skipped)
        return LossScale(scale, np.int32(good), last.skipped)
