"""The path of a GPU's gradients through the host, for loops in which each instance is one replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from collectives.plans.spread import Spread
from strategies.exchange.on_device import HOST, DevicePath
from strategies.torch.exchange.arithmetic import torch_dtype
from strategies.torch.tensors import as_array, host_array


@final
class TorchHostPath(DevicePath):
    """Means that the communicator makes in the memory of the host, page-locked if a GPU copies to it.

    496 MB take 9 ms each way on an H100, and 319 ms without page locks. While one buffer is added, the next ones are
    being copied.

    Args:
        communicator: The communicator of all instances, with one replica each.
        device: The device of the gradients.
    """

    word = HOST

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        super().__init__(Spread.apart((1,) * communicator.size), communicator.rank)
        self._communicator, self._device = communicator, device
        self._memory: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @override
    def means(
        self, name: str, sums: Sequence[Sequence[torch.Tensor]], dtypes: Sequence[np.dtype]
    ) -> Sequence[torch.Tensor]:
        """Return the mean of each buffer. Waits for the gradients, but not for the copies back to the device."""
        with torch.no_grad():
            rooms = [
                self._rooms(name, number, of_buffer[0].numel(), torch_dtype(dtype))
                for number, (of_buffer, dtype) in enumerate(zip(sums, dtypes, strict=True))
            ]
            arrivals = []
            for (given, _), (own,) in zip(rooms, sums, strict=True):
                given.copy_(own, non_blocking=True)
                arrivals.append(self._mark())
            found = []
            for number, ((given, mean), arrival) in enumerate(zip(rooms, arrivals, strict=True)):
                if arrival is not None:
                    arrival.synchronize()  # the stream has copied earlier means by then, so `mean` may be overwritten
                if given.numel():
                    of_buffer = f"{name}/{number}"
                    self._communicator.ordered_all_reduce([as_array(given)], as_array(mean), "mean", name=of_buffer)
                found.append(mean.to(self._device, non_blocking=True, copy=True))
            return found

    @override
    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor:
        octets = np.ascontiguousarray(host_array(own)).view(np.uint8)
        gathered = torch.from_numpy(self._communicator.all_gather(octets, name=name))
        return gathered.view(own.dtype).to(self._device)

    @override
    def close(self) -> None:
        self._memory.clear()

    def _rooms(self, name: str, number: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for a buffer and for its mean, the same in each step."""
        key = name, number
        known = self._memory.get(key)
        if known is None or known[0].numel() != size or known[0].dtype != dtype:
            is_locked = self._device.type == "cuda"
            one, other = (torch.empty(size, dtype=dtype, pin_memory=is_locked) for _ in range(2))
            known = self._memory[key] = one, other
        return known

    def _mark(self) -> torch.cuda.Event | None:
        """Return a CUDA event that follows all copies so far; None on a device that copies at once."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
