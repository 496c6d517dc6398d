"""Arithmetic of updates: stochastic rounding, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from strategies.typing import Gradients, OptimizerState, Variables

# ---- stochastic rounding

_FRACTION_BITS = {"bfloat16": 16, "float16": 13}  # of float32's fraction that the dtype does not have
_SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14}


def round_stochastically(values: jax.Array, dtype: DTypeLike, bits: jax.Array) -> jax.Array:
    """Round to one of the two neighbours in `dtype`, more probably the nearer one, so that the mean is exact.

    Args:
        values: float32.
        dtype: bfloat16 or float16. (Of float16, numbers below its normal range are rounded to the nearest.)
        bits: random uint32, of the shape of the values.

    Returns:
        Values of `dtype`, of the same shape. What is not finite stays so.
    """
    dropped = _FRACTION_BITS[jnp.dtype(dtype).name]
    noise = bits >> (32 - dropped)
    rounded = (jax.lax.bitcast_convert_type(values, jnp.uint32) + noise) >> dropped << dropped
    truncated = jax.lax.bitcast_convert_type(rounded, jnp.float32)
    is_ordinary = jnp.isfinite(values) & (jnp.abs(values) >= _SMALLEST_NORMAL[jnp.dtype(dtype).name])
    return jnp.where(is_ordinary, truncated, values).astype(dtype)


def add_stochastically(
    variables: Variables, changes: Gradients, bits_of: Callable[[int, jax.Array], jax.Array]
) -> Variables:
    """`optax.apply_updates`, added in float32; variables of 16 bits are rounded stochastically.

    Args:
        variables: a pytree of arrays.
        changes: a pytree of the same structure.
        bits_of: the random bits for leaf number i, given that leaf.
    """
    leaves, structure = jax.tree.flatten(variables)
    changed = []
    for number, (leaf, change) in enumerate(zip(leaves, jax.tree.leaves(changes), strict=True)):
        if leaf.dtype.name in _FRACTION_BITS:
            total = leaf.astype(jnp.float32) + change.astype(jnp.float32)
            changed.append(round_stochastically(total, leaf.dtype, bits_of(number, leaf)))
        else:
            changed.append((leaf + change).astype(leaf.dtype))
    return jax.tree.unflatten(structure, changed)


# ---- clipping, for whole and for sharded optimizer state


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

    def update(
        updates: Gradients, state: OptimizerState, params: Variables = None, *, gradient_norm: jax.Array, **_: object
    ) -> tuple[Gradients, OptimizerState]:
        factor = jnp.where(gradient_norm < max_norm, 1.0, max_norm / gradient_norm)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
