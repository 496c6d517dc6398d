"""The path between instances that gradients of PyTorch take, one for all modules that share a communicator."""

from __future__ import annotations

import os
import weakref
from weakref import WeakKeyDictionary

import numpy as np
import torch

from collectives import Communicator
from collectives.plans.spread import Spread
from strategies.errors import StrategyError
from strategies.exchange.on_device import AUTO, COMPILED, HOST, DevicePath
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.on_device.compiled_path import TorchCompiledPath

_paths: WeakKeyDictionary[Communicator, dict[torch.device, DevicePath]] = WeakKeyDictionary()


def path_between(replicas: Replicas, device: torch.device, obstacle: str = "") -> DevicePath | None:
    """Return the path between the instances for tensors on a device; None if gradients go through the host.

    A collective call for the first module on a device. The path ends with the communicator.

    Args:
        replicas: of all instances, on two of them at least.
        device: on which gradients lie.
        obstacle: the reason why these gradients cannot stay there, and the way out; "" if they can.

    Raises:
        StrategyError: there is an obstacle, and an exchange on devices was asked for.
    """
    word = _word(replicas)
    if word in (AUTO, HOST):
        return None
    if obstacle:
        raise StrategyError(f"the exchange {word!r} was asked for, and {obstacle}; or use POPDIST_EXCHANGE=host")
    if word != COMPILED:
        raise StrategyError(f"gradients of PyTorch do not go by {word!r} yet; use POPDIST_EXCHANGE=host")
    communicator = replicas.communicator
    found = _paths.setdefault(communicator, {})
    if device not in found:
        own = np.array(len(replicas.local_replicas))
        counts = communicator.all_gather(own, name="replicas of instances")
        path = TorchCompiledPath(communicator, Spread.apart(counts.tolist()), device)
        weakref.finalize(communicator, path.close)
        found[device] = path
    return found[device]


def _word(replicas: Replicas) -> str:
    word = replicas.defaults.exchange
    return word if word != AUTO else os.environ.get("POPDIST_EXCHANGE", AUTO)
