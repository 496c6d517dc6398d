"""Loss scaling on the device: the host reads neither the scale nor whether gradients are finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from strategies.jax.gradients.tail import LOSS_SCALE
from strategies.loss_scaling import MOST, LossScale, LossScaling


@jax.jit
def scaled_control(control: jax.Array, scale: jax.Array) -> jax.Array:
    """Return control words with the scale of the loss; traceable."""
    return control.at[LOSS_SCALE].set(jax.lax.bitcast_convert_type(scale, jnp.int32))


def scale_after(scaling: LossScaling, last: LossScale, is_finite: jax.Array) -> LossScale:
    """Return the scale of the next loss, with the bits of `LossScaling.after`, without waiting for the device.

    Args:
        scaling: Rule of the scale.
        last: Scale of this step's loss.
        is_finite: Whether its gradients are finite, a bool scalar.
    """
    factor = np.array([scaling.factor], np.float64).view(np.int32)
    found: LossScale = _scale_after(last, is_finite, factor, scaling.initial, scaling.interval)
    return found


def _after(last: LossScale, is_finite: jax.Array, factor: jax.Array, initial: float, interval: int) -> LossScale:
    """Return the next scale, computed in float64 as on the host; traceable.

    Args:
        last: Scale of this step's loss.
        is_finite: Whether its gradients are finite, a bool scalar.
        factor: Bits of the factor, int32 [2]; an argument, because XLA multiplies by the reciprocal of a constant.
        initial: `LossScaling.initial`.
        interval: `LossScaling.interval`.
    """
    good, skipped = jnp.asarray(last.good_steps, jnp.int32) + 1, jnp.asarray(last.skipped, jnp.int32)
    with jax.enable_x64(True):
        scale, by = jnp.asarray(last.scale).astype(jnp.float64), jax.lax.bitcast_convert_type(factor, jnp.float64)
        lower = jnp.maximum(scale / by, min(1.0, initial)).astype(jnp.float32)
        higher = jnp.minimum(scale * by, MOST).astype(jnp.float32)
        same = scale.astype(jnp.float32)
        is_due = is_finite & (good >= interval) & (by > 1)
    return LossScale(
        jnp.where(is_finite, jnp.where(is_due, higher, same), lower),
        jnp.where(is_finite & ~is_due, good, 0).astype(jnp.int32),
        jnp.where(is_finite, skipped, skipped + 1),
    )


_scale_after = jax.jit(_after, static_argnums=(3, 4))
