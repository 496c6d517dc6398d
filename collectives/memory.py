"""Memory for results: aligned as XLA wants it, so that it is read in place."""

from __future__ import annotations

import numpy as np

ALIGNMENT_BYTES = 64


def aligned_empty(nbytes: int) -> np.ndarray:
    """`nbytes` bytes of private memory that begin at a multiple of ALIGNMENT_BYTES."""
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return memory[start : start + nbytes]
