"""The arithmetic of updates: stochastic rounding, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from strategies.typing import Gradients, OptimizerState, Variables

# ---- stochastic rounding

_FRACTION_BITS = {"bfloat16": 16, "float16": 13}  # bits of float32's fraction that the dtype lacks
_SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14}


def round_stochastically(values: jax.Array, dtype: DTypeLike, bits: jax.Array) -> jax.Array:
    """Round to one of the two neighbours in `dtype`, the nearer one more probably, so that the mean is exact.

    Args:
        values: float32 values.
        dtype: bfloat16 or float16. float16 values below its normal range are rounded to nearest.
        bits: Random uint32, of the shape of the values.

    Returns:
        Values of `dtype`, of the same shape. Infinity and NaN stay as they are.
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
    """Add changes in float32, like `optax.apply_updates`, and round variables of 16 bits stochastically.

    Args:
        variables: Pytree of arrays.
        changes: Pytree of the same structure.
        bits_of: Function `(number, leaf)` that returns the random bits for a leaf.
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
    """Clip gradients by their global norm (Pascanu et al., 2013).

    It is `optax.clip_by_global_norm` as the first of a chain, with the same bits whether or not optimizer state is
    sharded: `Trainer` gives it the norm of all mean gradients, of which a replica may have only a part.

    Example::

        optimizer = optax.chain(strategies.clip_by_global_norm(1.0), optax.adam(1e-3))

    Args:
        max_norm: Largest norm, above 0.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")

    def update(
        updates: Gradients, state: OptimizerState, params: Variables = None, *, gradient_norm: jax.Array, **_: object
    ) -> tuple[Gradients, OptimizerState]:
        factor = jnp.where(gradient_norm < max_norm, 1.0, max_norm / gradient_norm)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
