"""Lookup of table rows, as in embeddings, with a deterministic gradient that scatters without collisions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Return `table[indices]`, with a gradient that stays fast if operations are deterministic.

    The gradient of `table[indices]` is a scatter, which is slow on a GPU if it must be deterministic (docs: gpus). This
    gradient sorts the rows and adds equal rows in one fixed order, in float32 (in float64 for float64). It rounds each
    sum once and writes the sums to distinct places.

    Example::

        embedded = strategies.take_rows(variables["embedding"], batch["tokens"])  # [batch, length, width]

    Args:
        table: Floating-point array of shape (rows, ...).
        indices: Integer array of any shape, with values from 0 to rows - 1. Negative values count from the end. Other
            values behave as in JAX.

    Returns:
        The rows, of shape (*indices.shape, *table.shape[1:]).

    Raises:
        TypeError: If the table is not floating-point, or the indices are not integers.
    """
    table, indices = jnp.asarray(table), jnp.asarray(indices)
    if not jnp.issubdtype(table.dtype, jnp.floating) or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"the table is {table.dtype} and the indices are {indices.dtype}; take_rows needs floats and integers; for "
            "other dtypes use table[indices]"
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
    """Return the sum of the values for each row of a table, of shape (rows, ...)."""
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
    # Partial sums get distinct places past the end of the table, where they are dropped.
    unlike = jnp.where(is_last & (places >= 0) & (places < rows), places, rows + jnp.arange(places.size))
    return zeros.at[unlike].set(sums.astype(values.dtype), unique_indices=True, mode="drop")


def _added(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Add two neighbouring partial sums, unless a new row begins in the right one."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])
