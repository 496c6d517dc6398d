"""The paths between instances that modules in loops of the program's own have in common."""

from __future__ import annotations

import os
import weakref
from weakref import WeakKeyDictionary

import torch

from collectives import Communicator
from strategies.errors import StrategyError
from strategies.exchange.choice import asked_exchange
from strategies.exchange.on_device import AUTO, HOST, DevicePath
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.on_device.host_path import TorchHostPath
from strategies.torch.on_device.paths import path_over
from strategies.torch.replica_memory import HOST as HOST_MEMORY

_found: WeakKeyDictionary[Communicator, dict[torch.device, DevicePath | None]] = WeakKeyDictionary()


def path_between(replicas: Replicas, device: torch.device, obstacle: str = "") -> DevicePath | None:
    """Return the path between the instances, of one replica each, for tensors on a device; None for those on the host.

    A collective call for the first tensors on a device. The path ends with the communicator, or the process.

    Args:
        replicas: of all instances, on two of them at least.
        device: on which gradients lie, of the same type on all instances.
        obstacle: the reason why these gradients need the exchange in the memory of the host, and the way out; "" if
            they do not.

    Raises:
        DeviceError, MappingError: the exchange that is asked for cannot work.
        StrategyError: there is an obstacle, and an exchange on devices was asked for; or see `InstanceGroup`.
    """
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if obstacle and asked not in (AUTO, HOST):
        raise StrategyError(f"the exchange {asked!r} was asked for, and {obstacle}; or use POPDIST_EXCHANGE=host")
    if obstacle or (asked == HOST and device == HOST_MEMORY):
        return None
    found = _found.setdefault(replicas.communicator, {})
    if device not in found:
        path = None if asked == HOST else path_over(replicas, device, asked)
        if path is None and device != HOST_MEMORY:
            path = TorchHostPath(replicas.communicator, device)
        if path is not None:
            weakref.finalize(replicas.communicator, path.close)
        found[device] = path
    return found[device]
