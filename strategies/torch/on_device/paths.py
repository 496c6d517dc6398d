"""The choice of the path that gradients of PyTorch take between the instances."""

from __future__ import annotations

import logging
import os

import numpy as np
import torch

from collectives.cuda.device import CudaDevice
from collectives.cuda.regions import CudaMemory
from collectives.errors import MappingError
from collectives.mapped import MappedMemory
from collectives.plans.spread import Spread
from collectives.shared_memory.host_regions import HostMemory
from strategies.errors import StrategyError
from strategies.exchange.choice import GPU, ExchangeChoice, asked_exchange
from strategies.exchange.on_device import AUTO, HOST, WINDOW, DevicePath
from strategies.exchange.window_path import WindowPath
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.on_device.arithmetic import TorchArithmetic
from strategies.torch.on_device.compiled_path import TorchCompiledPath
from strategies.torch.on_device.local import TorchLocalPath
from strategies.torch.on_device.views import TorchViews
from strategies.torch.options import TorchOptions
from strategies.torch.replica_memory import ReplicaMemory

logger = logging.getLogger("strategies.exchange")


def path_for(replicas: Replicas, memory: ReplicaMemory, options: TorchOptions) -> DevicePath | None:
    """Return the path of gradients that stay on the replicas' device; None where they are exchanged on the host.

    With one instance they stay there, unless "host" is asked for. Collective, but for replicas without a device.

    Args:
        replicas: of all instances.
        memory: of this instance's replicas.
        options: of the training.

    Raises:
        DeviceError, MappingError, ValueError: see `path_over` and `asked_exchange`.
        StrategyError: an exchange on the device is asked for, and an option needs that of the host.
    """
    if not memory.is_shared:
        return None
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if asked == HOST or not _can_stay(options, asked):
        return None
    if replicas.num_instances == 1:
        return TorchLocalPath(replicas.num_replicas_in_sync, TorchArithmetic())
    return path_over(replicas, memory.device, asked)


def path_over(replicas: Replicas, device: torch.device, asked: str) -> DevicePath | None:
    """Return the path that several instances choose for gradients on a device; None for the host. Collective.

    Args:
        replicas: of all instances.
        device: of the same type on all instances.
        asked: see `asked_exchange`.

    Raises:
        DeviceError: see `Replicas.exchange_on`.
        MappingError: windows are asked for, and instances cannot map each other's memory.
    """
    choice = _choice(replicas, device)
    return _between_instances(replicas, device, choice, asked) if choice.is_on_device else None


def _can_stay(options: TorchOptions, asked: str) -> bool:
    """Return whether gradients can stay on the device with these options."""
    if not options.transfer.is_quantised:
        return True
    what = "gradient_transfer_dtype='int8' is quantised on the host"
    if asked != AUTO:
        raise StrategyError(
            f"{what}, and the exchange {asked!r} was asked for; use gradient_transfer_dtype='bfloat16', or the "
            "exchange 'host'"
        )
    logger.info("exchange host: gradients are added on the host (%s)", what)
    return False


def _choice(replicas: Replicas, device: torch.device) -> ExchangeChoice:
    """Return the choice of all instances; a collective call where it is not that of CPUs."""
    if device.type != "cuda":
        return replicas.exchange_on(device.type, "")
    return replicas.exchange_on(GPU, str(torch.cuda.get_device_properties(device).uuid))


def _between_instances(
    replicas: Replicas, device: torch.device, choice: ExchangeChoice, asked: str
) -> DevicePath | None:
    """Return the path that was chosen; a collective call."""
    communicator = replicas.communicator
    own = np.array(len(replicas.local_replicas), np.int64)
    spread = Spread.together(communicator.all_gather(own, name="replicas of each instance").tolist())
    if choice.word != WINDOW:
        return TorchCompiledPath(communicator, spread, device)
    try:
        return WindowPath(spread, communicator, _mapped_memory(device), TorchArithmetic(), TorchViews())
    except MappingError as error:
        if asked == WINDOW:
            raise
        logger.warning("exchange host: gradients are added on the host, as windows cannot be mapped: %s", error)
        return None


def _mapped_memory(device: torch.device) -> MappedMemory:
    return HostMemory() if device.type == "cpu" else CudaMemory(CudaDevice(device.index or 0))
