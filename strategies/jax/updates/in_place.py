"""Mean gradients that the update reads in the memory in which they arrive."""

from __future__ import annotations

import jax
import numpy as np

from strategies.exchange.flat import ALIGNMENT_BYTES
from strategies.typing import Gradients, Leaf


def in_place(means: Gradients, device: jax.Device) -> Gradients:
    """Return arrays of JAX in the memory of host arrays, made once for all steps.

    JAX turns every NumPy argument of a program into an array of its own, at each call: 2 to 5 us each.

    Args:
        means: Host arrays, which live as long as the results. A program reads the elements that they have when it runs.
        device: Device of the programs. If it is not the host's CPU, or XLA cannot read an array in place, the array
            itself is returned.
    """
    return means if device.platform != "cpu" else jax.tree.map(_in_place, means)


def _in_place(mean: np.ndarray) -> Leaf:
    address: int = mean.__array_interface__["data"][0]
    is_exportable = mean.dtype.kind in "fiu" and mean.dtype.isbuiltin == 1 and mean.flags.c_contiguous
    if not mean.size or not is_exportable or address % ALIGNMENT_BYTES:
        return mean
    return jax.dlpack.from_dlpack(mean, copy=False)
