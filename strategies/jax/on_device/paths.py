"""The choice of the path on which gradients on JAX's devices become means over all instances."""

from __future__ import annotations

import os

import numpy as np

from collectives.plans.spread import Spread
from strategies.exchange.choice import asked_exchange
from strategies.exchange.local_path import LocalPath
from strategies.exchange.on_device import COMPILED, DevicePath
from strategies.exchange.window_path import WindowPath, windows_if_possible
from strategies.exchange.windows import memory_of
from strategies.jax.on_device.arithmetic import JaxArithmetic
from strategies.jax.on_device.compiled_path import CompiledPath
from strategies.jax.on_device.views import JaxViews
from strategies.jax.replicas.replicas import Replicas


def path_for(replicas: Replicas) -> DevicePath | None:
    """Return the path of gradients that stay on the device, or None if they go through the host.

    Collective if several instances keep gradients on devices.

    Raises:
        DeviceError: The instances' devices cannot work together.
        MappingError: The job asks for windows, and the instances cannot map each other's memory.
    """
    if not replicas.exchange.is_on_device:
        return None
    communicator, device = replicas.communicator, replicas.devices.devices[0]
    if communicator.size == 1:
        return LocalPath(replicas.num_replicas_in_sync, JaxArithmetic(), replicas.local_replicas)
    counts = communicator.all_gather(np.array(len(replicas.local_replicas)), name="replicas of each instance")
    if replicas.exchange.word == COMPILED:
        return CompiledPath(Spread.apart(counts.tolist()), communicator, device)
    spread, gpu = Spread.together(counts.tolist()), None if device.platform == "cpu" else device.local_hardware_id
    return windows_if_possible(
        asked_exchange(replicas.defaults.exchange, os.environ),
        lambda: WindowPath(spread, communicator, memory_of(gpu), JaxArithmetic(), JaxViews(device)),
    )
