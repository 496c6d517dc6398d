"""Which checkpoints are the best ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from strategies.numbers import positive

_MODES = ("max", "min")


@dataclass(frozen=True)
class Best:
    """The checkpoints with the best value of a metric, of those that were saved with one.

    Attributes:
        metric: its name, see `Checkpoints.save`.
        mode: "max" or "min": which values are better.
        count: how many checkpoints.

    Raises:
        TypeError: if `count` is no integer.
        ValueError: if `mode` is another, or `count` is not positive.
    """

    metric: str
    mode: str = "max"
    count: int = 1

    def __post_init__(self) -> None:
        positive("count", self.count)
        if self.mode not in _MODES:
            raise ValueError(f"mode is {self.mode!r}; the best values are the largest ('max') or the smallest ('min')")

    def steps(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps of the best ones, the best first; of equal ones the earlier.

        Args:
            metrics: by the step; one without this metric, or with NaN, is never the best.
        """
        sign = -1 if self.mode == "max" else 1
        values = {step: of[self.metric] for step, of in metrics.items() if self.metric in of}
        known = [step for step, value in values.items() if not math.isnan(value)]
        return sorted(known, key=lambda step: (sign * values[step], step))[: self.count]
