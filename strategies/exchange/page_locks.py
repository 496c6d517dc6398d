"""Page locks on host memory, with which a GPU copies it at the speed of the bus, as far as the driver allows them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import numpy as np

from collectives.cuda.device import CudaDevice
from collectives.cuda.memory import PageLocked
from collectives.errors import CudaError

logger = logging.getLogger(__name__)

_LOCKED_BYTES = 1 << 20
"""From this size on pages are locked; the driver copies less through memory of its own."""


def lock_pages(arrays: Iterable[np.ndarray], gpu: int) -> list[PageLocked]:
    """Return locks on large arrays for a framework that copies between them and a GPU by itself; none without a driver.

    Args:
        arrays: of the host; kept alive.
        gpu: its ordinal among those that this process sees.
    """
    try:
        device = gpu_of(gpu)
    except CudaError as error:
        logger.warning("gradients are copied slowly to and from the GPU: %s", error)
        return []
    return locked(device, arrays)


@cache
def gpu_of(ordinal: int) -> CudaDevice:
    """Return the GPU of that ordinal, which stays open; see `CudaDevice`."""
    return CudaDevice(ordinal)


def locked(device: CudaDevice, arrays: Iterable[np.ndarray]) -> list[PageLocked]:
    """Return the page-locked memory of those arrays that are large, as far as the driver allows it.

    Without a lock copies are slower, and nothing else changes.
    """
    found = []
    for array in arrays:
        if array.nbytes < _LOCKED_BYTES:
            continue
        try:
            found.append(PageLocked(device, array))
        except CudaError as error:
            logger.warning("gradients are copied slowly to and from the GPU: %s", error)
            break
    return found
