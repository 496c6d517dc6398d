"""The distribution of the numbers in an array: a histogram, quantiles, and what float16 would make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from strategies.typing import Tree

BINS = 64
"""The number of bins of a histogram, as Weights & Biases has by default."""
LEVELS = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
"""The levels of the quantiles, by name."""
_FLOAT16_ZERO = 2.0**-25
"""The largest magnitude that rounds to zero in float16."""
_FLOAT16_INFINITE = 65520.0
"""The smallest magnitude that rounds to infinity in float16."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """The distribution of the finite numbers in an array.

    Attributes:
        least: The smallest number; NaN if no number is finite.
        most: The largest number; NaN if no number is finite.
        counts: Numbers per bin, int64 `[BINS]`.
        edges: Edges of the bins, equally far apart, from the smallest number to the largest, float64 `[BINS + 1]`.
        quantiles: Quantiles by the names in `LEVELS`, interpolated linearly; NaN if no number is finite.
        total: Sum of the numbers.
        squares: Sum of their squares.
        not_finite: Count of NaNs and infinities, which are in no bin.
        float16_zero: Share of all numbers that are not zero but would become zero in float16.
        float16_inf: Share of all numbers that are finite but would become infinite in float16.
    """

    least: float
    most: float
    counts: np.ndarray
    edges: np.ndarray
    quantiles: Mapping[str, float]
    total: float
    squares: float
    not_finite: int
    float16_zero: float
    float16_inf: float

    @classmethod
    def of(cls, array: np.ndarray) -> Distribution:
        """Return the distribution of an array of any floating-point dtype."""
        flat = _as_known(array).reshape(-1)
        with np.errstate(all="ignore"):
            finite = flat[np.isfinite(flat)]
            sizes = np.abs(finite)
            counts, edges = _histogram(finite.astype(np.float64))
            is_zero, is_infinite = (sizes <= _FLOAT16_ZERO) & (sizes > 0), sizes >= _FLOAT16_INFINITE
            levels = np.quantile(finite, list(LEVELS.values())) if finite.size else np.full(len(LEVELS), np.nan)
            return cls(
                least=float(finite.min()) if finite.size else float("nan"),
                most=float(finite.max()) if finite.size else float("nan"),
                counts=counts,
                edges=edges,
                quantiles=dict(zip(LEVELS, levels.tolist(), strict=True)),
                total=float(finite.sum(dtype=np.float64)),
                squares=float(np.square(finite, dtype=np.float64).sum()),
                not_finite=flat.size - finite.size,
                float16_zero=np.count_nonzero(is_zero) / max(flat.size, 1),
                float16_inf=np.count_nonzero(is_infinite) / max(flat.size, 1),
            )

    @property
    def told(self) -> dict[str, object]:
        """The distribution as values of JSON, for another instance."""
        return {**asdict(self), "counts": self.counts.tolist(), "edges": self.edges.tolist()}

    @classmethod
    def heard(cls, told: Tree) -> Distribution:
        """Return a distribution from `told`, with the same bits."""
        return cls(**{**told, "counts": np.array(told["counts"], np.int64), "edges": np.array(told["edges"])})

    @property
    def size(self) -> int:
        """The count of finite numbers."""
        return int(self.counts.sum())

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """The distribution without its histogram: minimum, quantiles, maximum, and the counts and shares."""
        return {
            "min": self.least,
            **self.quantiles,
            "max": self.most,
            "float16_zero": self.float16_zero,
            "float16_inf": self.float16_inf,
            "not_finite": float(self.not_finite),
        }


def _histogram(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts and edges of bins that hold all of the numbers, which are finite and float64."""
    ends = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 0.0)
    try:
        counts, edges = np.histogram(numbers, BINS, ends)
    except ValueError:  # the ends are too near to each other, or too far apart, for bins of a finite size
        size = min(max(map(abs, ends)), np.finfo(np.float64).max / 4)
        size = max(size, np.finfo(np.float64).tiny * BINS)
        counts, edges = np.histogram(np.clip(numbers, -size, size), BINS, (-size, size))
    return counts.astype(np.int64), edges


def _as_known(array: np.ndarray) -> np.ndarray:
    """Return an array of float32 or float64, whose quantiles NumPy knows."""
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
