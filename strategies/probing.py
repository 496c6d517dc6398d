"""Values with which two programs are compared: such as no training begins with, so that equal bits mean something.

A last layer of zeros makes all other gradients zero, and a learning rate that warms up from zero changes no variable:
programs that round differently look alike then.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def variables_like(variables: Any, seed: int) -> Any:
    """Random variables of the same shapes and dtypes, where the given ones lie; of unit variance for each output."""
    random = np.random.default_rng(seed)

    def draw(leaf: jax.Array) -> jax.Array:
        inputs = math.prod(leaf.shape[:-1]) if leaf.ndim > 1 else 1
        drawn = (random.standard_normal(leaf.shape) / math.sqrt(max(inputs, 1))).astype(leaf.dtype)
        placed: jax.Array = jax.device_put(drawn, leaf.sharding)
        return placed

    return jax.tree.map(draw, variables)


def batch_like(batch: Any, seed: int) -> Any:
    """A batch with other floating-point numbers, of unit variance; integers, such as labels, are the same."""
    random = np.random.default_rng(seed)

    def draw(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        drawn = random.standard_normal(leaf.shape).astype(leaf.dtype)
        return jax.device_put(drawn, leaf.sharding) if isinstance(leaf, jax.Array) else drawn

    return jax.tree.map(draw, batch)
