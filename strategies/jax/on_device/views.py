"""The memory behind JAX's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from collectives.dlpack import ExportedArray
from strategies.jax.programs.program import jit


@final
class JaxViews:
    """The `DeviceViews` of JAX.

    Args:
        device: Device for copies of the mapped memory. Host memory belongs to the first simulated device.
    """

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def view(self, array: ExportedArray) -> jax.Array:
        """Return an array of JAX that views memory of a path, without a copy."""
        found: jax.Array = jax.dlpack.from_dlpack(array, copy=False if array.nbytes else None)
        return found

    def addresses(self, arrays: Sequence[jax.Array]) -> list[int]:
        """Wait until arrays have been computed, and return their addresses."""
        jax.block_until_ready(arrays)
        return [array.unsafe_buffer_pointer() for array in arrays]

    def dtype_of(self, array: jax.Array) -> np.dtype:
        """Return the NumPy dtype of an array."""
        return np.dtype(array.dtype)

    def taken(self, view: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> list[jax.Array]:
        """Wait for, and return, copies of parts of a flat view."""
        found = _taken(tuple(starts), tuple(sizes))(view)
        return [self._placed(one) for one in jax.block_until_ready(found)]

    def stacked(self, rows: Sequence[jax.Array]) -> jax.Array:
        """Wait for, and return, a copy of flat views, stacked along a new first axis."""
        return self._placed(jax.block_until_ready(_stacked(rows)))

    def _placed(self, array: jax.Array) -> jax.Array:
        return array if array.devices() == {self._device} else jax.device_put(array, self._device)


@cache
def _taken(starts: tuple[int, ...], sizes: tuple[int, ...]) -> jax.stages.Wrapped:
    def taken(flat: jax.Array) -> list[jax.Array]:
        # A copy, because XLA returns a slice that is the whole array as the array itself, in memory that changes.
        return [jnp.copy(flat[start : start + size]) for start, size in zip(starts, sizes, strict=True)]

    return jit(taken)


@jax.jit
def _stacked(rows: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(rows)
