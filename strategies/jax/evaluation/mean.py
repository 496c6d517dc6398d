"""The mean, a metric that is merged exactly from its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

import strategies.trees as trees
from strategies.core.evaluation import ReadAsValue
from strategies.late_jax import jnp
from strategies.typing import Numbers


@partial(trees.register_dataclass, data_fields=["total", "count"], meta_fields=[])
@dataclass(frozen=True)
class Mean(ReadAsValue):
    """A mean that is merged exactly, because it is kept as a sum and a count.

    Example:
        >>> from strategies import Mean
        >>> Mean(6.0, 3).merge(Mean(4.0, 1)).value
        2.5

    Attributes:
        total: Sum of the numbers, of any shape; float64 once it has left the replica.
        count: Number of the numbers, or sum of their weights: a scalar, or of the shape of `total`; float64 once it has
            left the replica.
    """

    total: Numbers
    count: Numbers

    @classmethod
    def of(cls, values: Numbers, weights: Numbers) -> Mean:
        """Return the mean of rows; traceable.

        Args:
            values: Floating-point numbers, bools or integers `[rows, ...]`.
            weights: Mask or numbers `[rows]`. A row of weight 0 may have any value, also NaN.
        """
        values, weights = jnp.asarray(values, jnp.float32), jnp.asarray(weights, jnp.float32)
        of_rows = weights.reshape(-1, *[1] * (values.ndim - 1))
        return cls(jnp.where(of_rows == 0, 0, values * of_rows).sum(0), weights.sum())

    def merge(self, other: Mean) -> Mean:
        """Return the mean over the numbers of both means."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Numbers:
        """The mean: a float, or a float64 array of the shape of `total`; NaN if the count is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = np.divide(self.total, self.count)
        return quotient if quotient.ndim else float(quotient)

    def widened(self) -> Mean:
        """Return the mean with float64 values, in which the sums of replicas are added."""
        return Mean(np.asarray(self.total, np.float64), np.asarray(self.count, np.float64))
