"""Page locks on host memory, which let a GPU copy it at the speed of the bus, if the driver allows them."""

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
"""The least size of arrays whose pages are locked; the driver copies smaller arrays through its own memory."""


def lock_pages(arrays: Iterable[np.ndarray], gpu: int) -> list[PageLocked]:
    """Return locks on large arrays, for a framework that copies between them and a GPU; none without a driver.

    Args:
        arrays: Arrays of the host; kept alive.
        gpu: Ordinal of the GPU among those that this process sees.
    """
    try:
        device = gpu_of(gpu)
    except CudaError as error:
        logger.warning("gradients are copied slowly to and from the GPU: %s", error)
        return []
    return locked(device, arrays)


@cache
def gpu_of(ordinal: int) -> CudaDevice:
    """Return the GPU with that ordinal; it stays open until the process ends."""
    return CudaDevice(ordinal)


def locked(device: CudaDevice, arrays: Iterable[np.ndarray]) -> list[PageLocked]:
    """Return locks on the large arrays, as many as the driver allows.

    Without a lock copies are only slower.
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
