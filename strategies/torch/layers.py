"""The layers of a step on PyTorch, whose norms and distributions go to sinks of metrics, and the learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from popdist.records.distribution_settings import LEARNING_RATE
from strategies.core.distributions import Layers, layer_names
from strategies.exchange.shards import Shards
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import PartOfArray
from strategies.torch.device import HOST
from strategies.torch.tensors import host_array
from strategies.trees import ShapeOfArray
from strategies.typing import Leaf

_LR, _NAME = "lr", "name"


def layers_of(
    named: Sequence[tuple[str, torch.Tensor]],
    means: Sequence[torch.Tensor | None],
    replicas: Replicas,
    shards: Shards | None = None,
) -> Layers:
    """Return the layers of a step.

    Args:
        named: The trained parameters with their names, before the update; all are on one device.
        means: The mean gradient of each parameter; None for a parameter without one.
        replicas: The replicas of all instances.
        shards: The cuts of the mean gradients; None if they are whole.
    """
    names, variables = layer_names([name for name, _ in named]), [one for _, one in named]
    is_on_host = all(one.device == HOST for one in variables)

    def here(tensor: torch.Tensor | None) -> Leaf:
        return None if tensor is None else host_array(tensor) if is_on_host else tensor.detach()

    def gathered(number: int, part: Leaf) -> np.ndarray:
        assert shards is not None
        part = on_host(part)
        whole = ShapeOfArray(tuple(variables[number].shape), part.dtype)
        return PartOfArray(part, whole, shards, replicas).gather(f"the gradient of {names[number]}")

    on_host, norms = (np.asarray, None) if is_on_host else (host_array, device_norms)
    return Layers(names, [*map(here, variables)], [*map(here, means)], 1.0, shards, on_host, gathered, norms)


def layers_of_loop(parameters: Sequence[tuple[str, torch.nn.Parameter]], replicas: Replicas) -> Layers:
    """Return the layers of a training loop of the program, with the gradients that its optimizer will use."""
    named = [(name, one) for name, one in parameters if one.requires_grad]
    return layers_of(named, [None if one.grad is None else one.grad.to_dense() for _, one in named], replicas)


def device_norms(tensors: Sequence[torch.Tensor | None]) -> np.ndarray:
    """Return the norm of each tensor on a device, float64, after waiting for the device once; 0 for None."""
    found = [each for each in tensors if each is not None]
    norms = iter(torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in found]).tolist())
    return np.array([0.0 if each is None else next(norms) for each in tensors])


def learning_rates_of(optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
    """Return the learning rate of an optimizer's only group, or of each group by its name or number."""
    groups = optimizer.param_groups
    names = [LEARNING_RATE]
    if len(groups) > 1:
        names = [f"{LEARNING_RATE}/{group.get(_NAME, number)}" for number, group in enumerate(groups)]
    return {name: float(group[_LR]) for name, group in zip(names, groups, strict=True) if _LR in group}
