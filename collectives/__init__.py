"""Collective operations on NumPy arrays whose sums do not depend on how replicas are spread over processes."""

from __future__ import annotations

import importlib
from types import ModuleType

from collectives.backends.thread import ThreadHub, run_on_threads
from collectives.communicator import Communicator
from collectives.errors import (
    BrokenError,
    BusyError,
    ClosedError,
    CollectiveError,
    CollectiveTimeoutError,
    LayoutMismatchError,
    MissingBackendError,
    PeerLostError,
    PeerRefusedError,
    SecurityError,
    UnsupportedBufferError,
)
from collectives.factory import Settings
from collectives.named import Handle
from collectives.waiting import Limits

__all__ = [
    "BACKENDS",
    "BrokenError",
    "BusyError",
    "ClosedError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "Handle",
    "LayoutMismatchError",
    "Limits",
    "MissingBackendError",
    "PeerLostError",
    "PeerRefusedError",
    "SecurityError",
    "Settings",
    "ThreadHub",
    "UnsupportedBufferError",
    "connect",
    "load_backend",
    "run_on_threads",
]

BACKENDS = ("single", "thread", "mpi", "grpc", "horovod")


def connect(backend: str, settings: Settings | None = None, **options: object) -> Communicator:
    """Connect this rank with the others; a collective call, except for "single".

    Args:
        backend: one of BACKENDS, the name of a module in `collectives.backends`.
        settings: limits, progress record and mechanism.
        options: what the backend's own `connect` takes besides, e.g. `comm` for "mpi", `hub` and `rank` for "thread",
            `addresses` and `rank` for "grpc".

    Raises:
        ValueError: for an unknown backend.
        MissingBackendError: if the library behind the backend is not installed.
    """
    communicator: Communicator = load_backend(backend).connect(settings or Settings(), **options)
    return communicator


def load_backend(backend: str) -> ModuleType:
    """Return the module of a backend.

    Raises:
        ValueError: for an unknown backend.
        MissingBackendError: if the library behind the backend is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"no backend is called {backend!r}; use one of {', '.join(BACKENDS)}")
    return importlib.import_module(f"collectives.backends.{backend}")
