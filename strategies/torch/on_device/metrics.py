"""The metrics of a step, on a device until somebody reads them."""

from __future__ import annotations

import numpy as np
import torch

from strategies.torch.replica_memory import ReplicaMemory


class UnreadMetrics:
    """An array of one axis on a device, which is read once, when NumPy asks for it; that waits for the device.

    Args:
        values: on the device; nobody changes them.
        memory: which counts what is read.
    """

    def __init__(self, values: torch.Tensor, memory: ReplicaMemory) -> None:
        self._values = values
        self._memory = memory
        self._read: np.ndarray | None = None
        self._is_ready = _event_of(values)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        if self._read is None:
            self._read = self._memory.read(self._values)
        return self._read.copy() if copy else self._read

    def __getitem__(self, number: int) -> np.float32:
        return np.float32(np.asarray(self)[number])

    def is_ready(self) -> bool:
        """Return whether reading would not wait."""
        return self._read is not None or self._is_ready is None or bool(self._is_ready.query())

    def is_deleted(self) -> bool:
        """Return whether the memory was given up, which it never is."""
        return False


def _event_of(values: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event behind all that the values depend on; None on a device without events."""
    if values.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return event
