"""The values that travel besides gradients: control words into a replica's program, the tail out of it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from strategies.core.weights import weighted_means
from strategies.jax.programs.xla_pitfalls import with_rounded_products
from strategies.typing import Leaf

STEP, NOTICE, LOSS_SCALE, LOSS, WEIGHT = range(5)
"""Positions in the control words of a step."""
_LEAST_NORMAL = 0x00800000  # the bits of 2**-126
LEAST_WEIGHT, _TOO_SMALL = 2.0**-96, 2.0**-116
"""The least mean weight, and the number that travels for a subnormal one, so that means of it are refused.

XLA flushes numbers below 2**-126 to 0, so mean gradients with the least mean weight lose less than 2**-30.
"""


def control_words(step: int, notice: bool, loss_scale: float) -> np.ndarray:
    """Return the inputs of a step besides state and batch: int32 [4]; the last two are bits of float32 numbers.

    The mean loss is 0 until it is known; `TailLayout.with_means` puts it in, and the mean weight behind it.
    """
    return np.array([step, notice, np.float32(loss_scale).view(np.int32), 0], np.int32)


def loss_of(control: jax.Array) -> jax.Array:
    """Return the mean loss in the control words, a float32 scalar; traceable."""
    return jax.lax.bitcast_convert_type(control[LOSS], jnp.float32)


def weight_of(control: jax.Array) -> jax.Array | None:
    """Return the mean weight in the control words, a float32 scalar; None if losses have no weights; traceable."""
    return jax.lax.bitcast_convert_type(control[WEIGHT], jnp.float32) if control.shape[0] > WEIGHT else None


@dataclass(frozen=True)
class TailLayout:
    """The places of the values in a tail, float32: the loss, the metrics, the weight, the notice, and flags.

    Attributes:
        names: Names of the metrics; the first is "loss".
        is_weighted: Whether there is a weight; then the loss and the metrics are multiplied by it.
        has_finite: Whether a flag says that a gradient is not finite, for loss scaling.
        flags: Number of values at the end that say which gradients are not finite.
    """

    names: tuple[str, ...]
    is_weighted: bool
    has_finite: bool
    flags: int

    @property
    def num_values(self) -> int:
        """The number of values of a micro-batch: the loss, the metrics, and the weight if there is one."""
        return len(self.names) + self.is_weighted

    @property
    def weight(self) -> int:
        """The place of the weight, if there is one."""
        return len(self.names)

    @property
    def notice(self) -> int:
        """The place of the notice."""
        return self.num_values

    @property
    def finite(self) -> int:
        """The place of the flag for gradients that are not finite, with loss scaling."""
        return self.num_values + 1

    @property
    def size(self) -> int:
        """The number of values."""
        return self.finite + self.has_finite + self.flags

    def weighted(self, tail: Leaf) -> Leaf:
        """Return the mean tail with weighted means of the loss and the metrics.

        Args:
            tail: Mean tail of all replicas, on the host or traced.
        """
        if not self.is_weighted:
            return tail
        weight = tail[self.weight]
        if isinstance(tail, np.ndarray):
            return np.concatenate([weighted_means(tail[: self.weight], float(weight)), tail[self.weight :]])
        return tail.at[: self.weight].divide(weight)

    def with_means(self, control: Leaf, tail: Leaf) -> Leaf:
        """Return the control words with the mean loss of all replicas, and the mean weight if any, for the update.

        Args:
            control: Control words of `control_words`, on the host or traced.
            tail: Mean tail that `weighted` has returned, on the host or traced.
        """
        means = [tail[:1]]
        if self.is_weighted:
            means.append(tail[self.weight : self.weight + 1])
        if isinstance(control, np.ndarray):
            return np.concatenate([control[:LOSS], *(mean.view(np.int32) for mean in means)])
        return jnp.concatenate([control[:LOSS], *(jax.lax.bitcast_convert_type(mean, jnp.int32) for mean in means)])


def travelling(weight: ArrayLike | None) -> jax.Array:
    """Return a weight as it travels, see `strategies.core.weights.travelling`; traceable."""
    number = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    bits = jax.lax.bitcast_convert_type(number, jnp.int32)  # XLA takes a subnormal number for 0 in comparisons
    size = bits & 0x7FFFFFFF
    number = jnp.where((size > 0) & (size < _LEAST_NORMAL), _TOO_SMALL, number)
    return jnp.where(((bits >= 0) | (size == 0)) & jnp.isfinite(number), number, jnp.nan)


def times_weight(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Return values times a weight; zeros if the weight is 0, even of values that are not finite; traceable.

    Args:
        values: Values of any floating-point dtype; the result is float32 if it is narrower.
        weight: Weight of `travelling`.
    """
    return jnp.where(weight > 0, widened(values) * weight, 0)


def weighted_terms(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Return values times a weight, to be added: rounded as `with_rounded_products` does; traceable.

    The arguments are those of `times_weight`. Its result is differentiated, and this one is not.
    """
    terms: jax.Array = with_rounded_products(times_weight)(jax.lax.stop_gradient(values), weight)
    return terms


def widened(values: jax.Array) -> jax.Array:
    """Return floating-point values as float32 if they are narrower; traceable."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))
