"""What all tests share."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Have the programs that tests start, hundreds of JAX processes, compile the same thing once.

    All workers of pytest-xdist share the folder. JAX writes its files in place; a process that finds a half-written one
    compiles it by itself, and does not say so: what it writes is often part of a test.
    """
    if (cache := getattr(config, "cache", None)) is not None:  # pytest -p no:cacheprovider
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
    half_written = [f"ignore:Error {verb} persistent compilation cache:UserWarning" for verb in ("reading", "writing")]
    os.environ.setdefault("PYTHONWARNINGS", ",".join(half_written))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    if "jax" in sys.modules:  # by the conftest of a folder that was named on the command line
        options = sys.modules["jax"].config
        options.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
        options.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        options.update("jax_persistent_cache_min_entry_size_bytes", -1)
