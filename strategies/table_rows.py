"""Rows of a table, as embeddings take them, with a gradient that needs no scatter with collisions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Return `table[indices]`, with a gradient that is cheap where operations are deterministic.

    The gradient of `table[indices]` is a scatter, which takes long on a GPU where it has to be deterministic
    (docs: gpus). Here rows are sorted, added to their neighbours in one fixed order in float32 (float64 for float64),
    rounded once and written to places that are all different.

    Args:
        table: of shape (rows, ...), floats.
        indices: integers of any shape, 0 to rows - 1; below 0 they count from the end. Others are as in JAX.

    Returns:
        The rows, of shape (*indices.shape, *table.shape[1:]).

    Raises:
        TypeError: the table has no floats, or the indices are no integers.
    """
    table, indices = jnp.asarray(table), jnp.asarray(indices)
    if not jnp.issubdtype(table.dtype, jnp.floating) or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"a table of {table.dtype} and indices of {indices.dtype}; take_rows is for floats and integers, use "
            "table[indices]"
        )
    return _taken(table, indices, table.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _taken(table: jax.Array, indices: jax.Array, rows: int) -> jax.Array:
    return table[indices]


def _forward(table: jax.Array, indices: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    return table[indices], indices


def _backward(rows: int, indices: jax.Array, cotangents: jax.Array) -> tuple[jax.Array, np.ndarray]:
    flat = indices.reshape(-1)
    gradient = _sums_of_rows(
        jnp.where(flat < 0, flat + rows, flat), cotangents.reshape(flat.size, *cotangents.shape[indices.ndim :]), rows
    )
    return gradient, np.zeros(indices.shape, jax.dtypes.float0)


_taken.defvjp(_forward, _backward)


def _sums_of_rows(places: jax.Array, values: jax.Array, rows: int) -> jax.Array:
    """Return for each row of a table the sum of the values for it, of shape (rows, ...)."""
    zeros = jnp.zeros((rows, *values.shape[1:]), values.dtype)
    if not places.size:
        return zeros
    order = jnp.argsort(places, stable=True)
    places, wide = places[order], values[order].astype(jnp.promote_types(values.dtype, jnp.float32))
    changes = places[1:] != places[:-1]
    edge = jnp.ones(1, bool)
    begins = jnp.concatenate([edge, changes])
    _, sums = jax.lax.associative_scan(_added, (begins.reshape(-1, *[1] * (wide.ndim - 1)), wide))
    is_last = jnp.concatenate([changes, edge])
    # Past the end, where they are dropped, sums of a part of a row's values have places of their own.
    unlike = jnp.where(is_last & (places >= 0) & (places < rows), places, rows + jnp.arange(places.size))
    return zeros.at[unlike].set(sums.astype(values.dtype), unique_indices=True, mode="drop")


def _added(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Add what has come so far to the next values, unless a row begins with these."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])
