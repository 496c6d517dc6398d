"""Refuses what JAX would silently make float32, or another integer."""

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


def refuse_cut_integers(value: Any) -> Any:
    """The value, if JAX will not cut off integers.

    Raises:
        ValueError: if an array of NumPy has integers that do not fit into 32 bits, and JAX has no 64 bits enabled.
    """
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iu":
            continue
        kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if kept != leaf.dtype and not np.array_equal(leaf.astype(kept), leaf):
            raise ValueError(
                f"{leaf.dtype} numbers from {leaf.min()} to {leaf.max()}, of which JAX would keep {kept} only; give "
                "smaller ones, or enable 64 bits (JAX_ENABLE_X64=1)"
            )
    return value
