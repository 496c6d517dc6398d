"""Collective operations on NumPy arrays; the bits of sums do not depend on how replicas are spread over processes."""

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
    ForkedProcessError,
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
    "ForkedProcessError",
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
    """Connect this rank with the other ranks; a collective call, except for "single".

    Args:
        backend: Name of the backend, one of BACKENDS.
        settings: Limits, instruments and mechanism.
        options: Further arguments of the backend's own `connect`, e.g. `comm` for "mpi", `hub` and `rank` for "thread",
            `addresses` and `rank` for "grpc".

    Raises:
        ValueError: The backend is unknown.
        MissingBackendError: The library behind the backend is not installed.

    Example:
        >>> import numpy as np
        >>> with connect("single") as communicator:
        ...     communicator.all_reduce(np.array([1.0, 2.0]))
        array([1., 2.])
    """
    communicator: Communicator = load_backend(backend).connect(settings or Settings(), **options)
    return communicator


def load_backend(backend: str) -> ModuleType:
    """Import the module of a backend.

    Raises:
        ValueError: The backend is unknown.
        MissingBackendError: The library behind the backend is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"no backend is called {backend!r}; use one of {', '.join(BACKENDS)}")
    return importlib.import_module(f"collectives.backends.{backend}")
