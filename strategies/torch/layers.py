"""The layers of a step on PyTorch, whose norms and distributions go to sinks of metrics, and the learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from popdist.records.distribution_settings import LEARNING_RATE
from strategies.core.distributions import Layers, layer_names
from strategies.jax.replicas.replicas import Replicas
from strategies.jax.replicas.shards import PartOfArray
from strategies.torch.gradient_exchange import TorchGradientPlan
from strategies.torch.tensors import host_array
from strategies.torch.training import TorchTraining
from strategies.trees import ShapeOfArray
from strategies.typing import Leaf

_LR, _NAME = "lr", "name"


def layers_of(
    training: TorchTraining, plan: TorchGradientPlan, means: Sequence[torch.Tensor | None], replicas: Replicas
) -> Layers:
    """Return the layers of a step.

    Args:
        training: The training before the update.
        plan: The plan of the gradients.
        means: The mean gradient of each trained parameter; None for a parameter without one.
        replicas: The replicas of all instances.
    """
    names, variables = layer_names([parameter.name for parameter in plan.parameters]), training.trained
    is_on_host = training.memory_of_replicas.is_on_host

    def here(tensor: torch.Tensor | None) -> Leaf:
        return None if tensor is None else host_array(tensor) if is_on_host else tensor.detach()

    def gathered(number: int, part: Leaf) -> np.ndarray:
        assert plan.shards is not None
        part = on_host(part)
        whole = ShapeOfArray(tuple(variables[number].shape), part.dtype)
        return PartOfArray(part, whole, plan.shards, replicas).gather(f"the gradient of {names[number]}")

    on_host, norms = (np.asarray, None) if is_on_host else (host_array, device_norms)
    return Layers(names, [*map(here, variables)], [*map(here, means)], 1.0, plan.shards, on_host, gathered, norms)


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
