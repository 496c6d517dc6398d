"""The metrics of a step, which stay on a device until they are read."""

from __future__ import annotations

import numpy as np
import torch

from strategies.torch.replica_memory import ReplicaMemory


class UnreadMetrics:
    """An array of one axis on a device. NumPy's first access reads it, which waits for the device.

    Args:
        values: A tensor on the device, which must not change any more.
        memory: The memory of the replicas, which counts reads.
    """

    def __init__(self, values: torch.Tensor, memory: ReplicaMemory) -> None:
        self._unread: tuple[torch.Tensor, ReplicaMemory, torch.cuda.Event | None] | None
        self._unread = values, memory, _event_of(values)
        self._read = np.empty(0, np.float32)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        unread = self._unread  # read the attribute once: another thread may clear it
        if unread is not None:
            values, memory, event = unread
            if event is not None:
                event.synchronize()  # this thread may have another current stream
            self._read = memory.read(values)
            self._unread = None  # free the device's memory: programs keep metrics
        return self._read.copy() if copy else self._read

    def __getitem__(self, number: int) -> np.float32:
        return np.float32(np.asarray(self)[number])

    def is_ready(self) -> bool:
        """Return whether the values can be read without waiting."""
        _, _, event = self._unread or (None, None, None)
        return event is None or bool(event.query())

    def is_deleted(self) -> bool:
        """Return False: the memory is never released early."""
        return False


def _event_of(values: torch.Tensor) -> torch.cuda.Event | None:
    """Return a CUDA event that follows the computation of the values; None if the device is not CUDA."""
    if values.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return event
