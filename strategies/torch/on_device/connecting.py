"""The path between instances that gradients of PyTorch take, one for all modules that share a communicator."""

from __future__ import annotations

import logging
import os
import weakref
from weakref import WeakKeyDictionary

import numpy as np
import torch

from collectives import Communicator
from collectives.plans.spread import Spread
from strategies.errors import StrategyError
from strategies.exchange.choice import GPU, asked_exchange
from strategies.exchange.on_device import AUTO, COMPILED, HOST, DevicePath
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.on_device.compiled_path import TorchCompiledPath

logger = logging.getLogger("strategies.exchange")

_found: WeakKeyDictionary[Communicator, dict[torch.device, DevicePath | None]] = WeakKeyDictionary()


def path_between(replicas: Replicas, device: torch.device, obstacle: str = "") -> DevicePath | None:
    """Return the path between the instances for tensors on a device; None if gradients go through the host.

    A collective call for the first tensors on a device. The path ends with the communicator.

    Args:
        replicas: of all instances, on two of them at least.
        device: on which gradients lie, one of the same type on all instances.
        obstacle: the reason why these gradients cannot stay there, and the way out; "" if they can.

    Raises:
        DeviceError: the exchange that is asked for cannot work.
        StrategyError: there is an obstacle, and an exchange on devices was asked for; or see `InstanceGroup`.
    """
    asked = asked_exchange(replicas.defaults.exchange, os.environ)
    if obstacle:
        if asked not in (AUTO, HOST):
            raise StrategyError(f"the exchange {asked!r} was asked for, and {obstacle}; or use POPDIST_EXCHANGE=host")
        if device.type != "cpu":
            logger.info("gradients on %s go through the host: %s", device, obstacle)
        return None
    found = _found.setdefault(replicas.communicator, {})
    if device not in found:
        found[device] = path = _made(replicas, device, asked)
        if path is not None:
            weakref.finalize(replicas.communicator, path.close)
    return found[device]


def _made(replicas: Replicas, device: torch.device, asked: str) -> DevicePath | None:
    word = _word(replicas, device, asked)
    if word == HOST:
        return None
    communicator = replicas.communicator
    counts = communicator.all_gather(np.array(len(replicas.local_replicas)), name="replicas of instances")
    spread = Spread.apart(counts.tolist())
    if word == COMPILED:
        return TorchCompiledPath(communicator, spread, device)
    if asked == AUTO:
        return None
    raise StrategyError(f"gradients of PyTorch between instances do not go by {word!r}; use POPDIST_EXCHANGE=host")


def _word(replicas: Replicas, device: torch.device, asked: str) -> str:
    """Return the word of the exchange. It depends on where PyTorch computes, and not on the devices of JAX."""
    if device.type == "cpu":
        return COMPILED if asked == COMPILED else HOST
    if device.type != "cuda":
        return HOST
    return replicas.exchange_on(GPU, str(torch.cuda.get_device_properties(device).uuid)).word
