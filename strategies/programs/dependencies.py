"""Making something in a compiled program wait for something else, whose value it does not need.

`jax.lax.optimization_barrier` does not get that far on CPU: XLA drops barriers before it orders what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def is_true(arrays: Sequence[jax.Array]) -> jax.Array:
    """True, as soon as all arrays are there; the compiler does not know that no other value is possible."""
    answer = jnp.array(True)
    for array in arrays:
        if array.size:
            first = array.reshape(-1)[0]
            if jnp.issubdtype(array.dtype, jnp.floating):
                answer &= first * 0 != 1  # 0 times NaN is not 0, so it is not folded
            else:
                answer &= first.astype(jnp.int32) & 1 != 2
    return answer


def behind(condition: jax.Array, array: jax.Array) -> jax.Array:
    """The same array, for programs that may read it only when the condition, a result of `is_true`, is there."""
    return jnp.where(condition, array, jnp.zeros_like(array))
