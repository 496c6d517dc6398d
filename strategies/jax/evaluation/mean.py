"""The mean, a metric that is merged exactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from strategies.core.evaluation import ReadAsValue
from strategies.typing import Numbers


@partial(jax.tree_util.register_dataclass, data_fields=["total", "count"], meta_fields=[])
@dataclass(frozen=True)
class Mean(ReadAsValue):
    """A mean that is merged exactly, because it is kept as a sum and a count.

    Attributes:
        total: the sum of what is averaged, of any shape. Once it has left the replica it is float64.
        count: of how many numbers it is the sum, or of which weights: a scalar, or of the shape of the total. Likewise.
    """

    total: Numbers
    count: Numbers

    @classmethod
    def of(cls, values: Numbers, weights: Numbers) -> Mean:
        """Return the mean of rows; traceable.

        Args:
            values: floating-point numbers, bools or integers `[rows, ...]`.
            weights: `[rows]`: a mask, or numbers. A row of weight 0 may have any value, NaN too.
        """
        values, weights = jnp.asarray(values, jnp.float32), jnp.asarray(weights, jnp.float32)
        of_rows = weights.reshape(-1, *[1] * (values.ndim - 1))
        return cls(jnp.where(of_rows == 0, 0, values * of_rows).sum(0), weights.sum())

    def merge(self, other: Mean) -> Mean:
        """Return the mean over the numbers of both."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Numbers:
        """The mean: a float, or a float64 array of the shape of the total; NaN where there is nothing to average."""
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = np.divide(self.total, self.count)
        return quotient if quotient.ndim else float(quotient)

    def widened(self) -> Mean:
        """Return the same in float64, in which sums of a replica's rows are added."""
        return Mean(np.asarray(self.total, np.float64), np.asarray(self.count, np.float64))
