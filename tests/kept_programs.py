"""A folder that keeps compiled programs after a run of the tests, for each kind of machine and version of JAX."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

UNUSED_S = 14 * 24 * 3600.0
"""Removal of files that were not read for this long."""


def kept_programs(environ: Mapping[str, str]) -> Path:
    """Return the folder for this machine, which only its user may write, because programs in it are run.

    Raises:
        OSError: The folder cannot be made.
    """
    folder = _root(environ) / _kind_of_machine()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def remove_unused(environ: Mapping[str, str], now_s: float | None = None) -> None:
    """Remove files that were not read for long, for all versions, and empty files of killed writers."""
    oldest_s = (time.time() if now_s is None else now_s) - UNUSED_S
    for path in _root(environ).rglob("*"):
        with suppress(OSError):  # another run removes it too
            if path.is_file() and (path.stat().st_atime < oldest_s or not path.stat().st_size):
                path.unlink()


def _root(environ: Mapping[str, str]) -> Path:
    """Return the folder, beside the wheels of Horovod that install_horovod.sh keeps."""
    caches = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~", ".cache").expanduser()
    return Path(environ.get("POPDIST_CACHE") or Path(caches, "popdist-everywhere"), "compiled")


def _kind_of_machine() -> str:
    """Return a digest of all that a compiled program depends on besides its text: instructions, cores, libraries."""
    instructions = {line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features", "model name"))}
    versions = [version(name) for name in ("jax", "jaxlib")]
    cores = len(os.sched_getaffinity(0))
    words = [platform.machine(), str(cores), *versions, platform.python_version(), *sorted(instructions)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text(errors="replace").splitlines()
    return []
