"""Memory that PyTorch frees stays with the process.

glibc gives the kernel back what is free at the end of its heap, and large blocks at once. A training step frees its
activations and gradients, and the next one needs as much: each page is then asked for, cleared and mapped anew, which
took up to a third of a step of a small convolutional network. What a process keeps is what its largest step needed.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_NEVER = -1
_LARGE_BYTES = 1 << 30
"""Blocks of this size and more, as of data sets, go back when they are freed."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Have glibc keep it, for the whole process, unless the environment says what it does about that.

    Returns:
        Whether it does so now; False where the environment decides, or the C library is another one.
    """
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGE_BYTES))
