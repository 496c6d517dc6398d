"""The choice of the path that PyTorch's gradients take between instances."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from typing import final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from typing_extensions import override

from collectives import Communicator
from collectives.plans.spread import Spread
from strategies.errors import StrategyError
from strategies.exchange.choice import GPU, asked_exchange
from strategies.exchange.local_path import LocalPath
from strategies.exchange.on_device import AUTO, HOST, WINDOW, DevicePath
from strategies.exchange.window_path import WindowPath, windows_if_possible
from strategies.exchange.windows import memory_of
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.device import HOST as HOST_MEMORY
from strategies.torch.device import ReplicaMemory
from strategies.torch.exchange.arithmetic import TorchArithmetic, TorchViews, torch_dtype
from strategies.torch.exchange.compiled_path import TorchCompiledPath
from strategies.torch.options import TorchOptions
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


logger = logging.getLogger("strategies.exchange")

_of_loops: WeakKeyDictionary[Communicator, dict[torch.device, DevicePath | None]] = WeakKeyDictionary()


def path_for(replicas: Replicas, memory: ReplicaMemory, options: TorchOptions) -> DevicePath | None:
    """Return the path by which a device exchanges gradients; None if the host exchanges them.

    A single instance uses its device, unless "host" is requested. Collective, if replicas have a device.

    Args:
        replicas: The replicas of all instances.
        memory: The memory of this instance's replicas.
        options: The options of the training.

    Raises:
        DeviceError, ValueError: As `Replicas.exchange_on` and `asked_exchange` do.
        MappingError: If windows are requested, but instances cannot map each other's memory.
        StrategyError: If an exchange on the device is requested, but an option needs the host's.
    """
    if not memory.is_shared:
        return None
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if asked == HOST or not _can_stay(options, asked):
        return None
    if replicas.num_instances == 1:
        return LocalPath(replicas.num_replicas_in_sync, TorchArithmetic())
    return _between_instances(replicas, memory.device, asked)


def path_of_loops(replicas: Replicas, device: torch.device, obstacle: str = "") -> DevicePath | None:
    """Return the path that models in loops of the program's own share; None for tensors on the host.

    Collective for the first tensors on a device. The path is closed when the communicator is freed, or when
    the process ends.

    Args:
        replicas: The replicas of all instances: two or more instances, with one replica each.
        device: The device of the gradients, of the same type on all instances.
        obstacle: The reason why these gradients need the host's exchange, and the way out; "" if there is none.

    Raises:
        DeviceError, MappingError: If the requested exchange cannot work.
        StrategyError: If there is an obstacle and an exchange on devices was requested, or an instance cannot connect.
    """
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if obstacle and asked not in (AUTO, HOST):
        raise StrategyError(f"the exchange {asked!r} was requested, but {obstacle}; or use POPDIST_EXCHANGE=host")
    if obstacle or (asked == HOST and device == HOST_MEMORY):
        return None
    found = _of_loops.setdefault(replicas.communicator, {})
    if device not in found:
        path = None if asked == HOST else _between_instances(replicas, device, asked)
        if path is None and device != HOST_MEMORY:
            path = TorchHostPath(replicas.communicator, device)
        if path is not None:
            weakref.finalize(replicas.communicator, path.close)
        found[device] = path
    return found[device]


def _can_stay(options: TorchOptions, asked: str) -> bool:
    """Return whether gradients can stay on the device with these options."""
    if not options.transfer.is_quantised:
        return True
    what = "gradient_transfer_dtype='int8' is quantised on the host"
    if asked != AUTO:
        raise StrategyError(
            f"{what}, but the exchange {asked!r} was requested; use gradient_transfer_dtype='bfloat16', or the "
            "exchange 'host'"
        )
    logger.info("exchange host: gradients are added on the host (%s)", what)
    return False


def _between_instances(replicas: Replicas, device: torch.device, asked: str) -> DevicePath | None:
    """Return the path that several instances choose for gradients on a device; None for the host. Collective."""
    gpu = None
    if device.type == "cuda":
        gpu = device.index or 0
        choice = replicas.exchange_on(GPU, str(torch.cuda.get_device_properties(device).uuid))
    else:
        choice = replicas.exchange_on(device.type, "")
    if not choice.is_on_device:
        return None
    communicator = replicas.communicator
    counts = communicator.all_gather(np.array(len(replicas.local_replicas)), name="replicas of each instance")
    spread = Spread.together(counts.tolist())
    if choice.word != WINDOW:
        return TorchCompiledPath(communicator, spread, device)
    return windows_if_possible(
        asked, lambda: WindowPath(spread, communicator, memory_of(gpu), TorchArithmetic(), TorchViews())
    )
