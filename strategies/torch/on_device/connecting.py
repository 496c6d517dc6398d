"""The paths between instances that modules in loops of the program's own have in common."""

from __future__ import annotations

import logging
import os
import weakref
from weakref import WeakKeyDictionary

import torch

from collectives import Communicator
from strategies.errors import StrategyError
from strategies.exchange.choice import asked_exchange
from strategies.exchange.on_device import AUTO, HOST, DevicePath
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.on_device.paths import path_over

logger = logging.getLogger("strategies.exchange")

_found: WeakKeyDictionary[Communicator, dict[torch.device, DevicePath | None]] = WeakKeyDictionary()


def path_between(replicas: Replicas, device: torch.device, obstacle: str = "") -> DevicePath | None:
    """Return the path between the instances for tensors on a device; None if gradients go through the host.

    A collective call for the first tensors on a device. The path ends with the communicator, or the process.

    Args:
        replicas: of all instances, on two of them at least.
        device: on which gradients lie, of the same type on all instances.
        obstacle: the reason why these gradients cannot stay there, and the way out; "" if they can.

    Raises:
        DeviceError, MappingError: the exchange that is asked for cannot work.
        StrategyError: there is an obstacle, and an exchange on devices was asked for; or see `InstanceGroup`.
    """
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if asked == HOST:
        return None
    if obstacle:
        if asked != AUTO:
            raise StrategyError(f"the exchange {asked!r} was asked for, and {obstacle}; or use POPDIST_EXCHANGE=host")
        if device.type != "cpu":
            logger.info("gradients on %s go through the host: %s", device, obstacle)
        return None
    found = _found.setdefault(replicas.communicator, {})
    if device not in found:
        found[device] = path = path_over(replicas, device, asked)
        if path is not None:
            weakref.finalize(replicas.communicator, path.close)
    return found[device]
