"""Clipping by the norm of all gradients, for whole and for sharded optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scales gradients down where the norm of all of them together is larger than `max_norm`.

    Like `optax.clip_by_global_norm` as the first of a chain, with the same bits whether or not optimizer state is
    sharded: `Trainer` gives it the norm of the mean gradients, of which a replica sees only a part.

    Args:
        max_norm: above 0.

    Raises:
        ValueError: if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it is above 0")

    def update(updates: Any, state: Any, params: Any = None, *, gradient_norm: jax.Array, **_: Any) -> tuple[Any, Any]:
        factor = jnp.where(gradient_norm < max_norm, 1.0, max_norm / gradient_norm)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
