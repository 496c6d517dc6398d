"""Imports of large libraries without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import without garbage collection.

    JAX, optax and PyTorch make 100,000 permanent objects each. Looking through them again and again takes a fifth of
    their imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
