"""Refuses what JAX would silently make float32."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def refuse_float64(value: Any, role: str = "input") -> Any:
    """The value, if JAX will not silently change its precision.

    Raises:
        TypeError: if a leaf is float64, and JAX has no 64 bits enabled.
    """
    if not jax.config.read("jax_enable_x64"):
        for leaf in jax.tree.leaves(value):
            if getattr(leaf, "dtype", None) == np.float64:
                raise TypeError(f"Unsupported data type for {role}: float64; convert it to float32")
    return value
