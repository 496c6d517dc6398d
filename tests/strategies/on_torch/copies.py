"""Replicas in plain PyTorch: each is a copy of the module, as if it had a process of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from idiom import Found, Idiom, drawn, rows_of
from torch import nn

import strategies.torch
from collectives.reduction import Reduction


def mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean over replicas, added in the order of the tree."""
    first = tensors[0].detach()
    if first.is_complex():
        return torch.view_as_complex(mean_of([torch.view_as_real(one.detach()) for one in tensors]))
    if first.dtype == torch.bfloat16:
        arrays = [one.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16) for one in tensors]
    else:
        arrays = [one.detach().contiguous().numpy() for one in tensors]
    arrays = [one.reshape(-1) for one in arrays]
    found = np.empty_like(arrays[0])
    Reduction("mean", found.dtype).reduce(arrays, found, len(arrays))
    if first.dtype == torch.bfloat16:
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).reshape(first.shape)
    return torch.from_numpy(found).reshape(first.shape)


def agreed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the value on which replicas agree: a mean, or replica 0's if it is no floating-point number."""
    return mean_of(tensors) if tensors[0].is_floating_point() else tensors[0].detach().clone()


@torch.no_grad()
def share(modules: Sequence[nn.Module]) -> None:
    """Give all copies the trained parameters of the first, and buffers and frozen parameters that they agree on."""
    for group in zip(*(one.parameters() for one in modules), strict=True):
        value = group[0].clone() if group[0].requires_grad else agreed(group)
        for one in group:
            one.data = value.clone()
    for group in zip(*(list(one.named_buffers()) for one in modules), strict=True):
        value = agreed([one for _, one in group])
        for module, (name, one) in zip(modules, group, strict=True):
            if one.shape == value.shape:
                one.copy_(value)
            else:
                module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = value.clone()


def gradients(
    modules: Sequence[nn.Module], loss: Callable[..., Any], step: int, missing: str = "error"
) -> tuple[float, list[torch.Tensor | None]]:
    """Return the mean loss and the mean gradients of a step; `missing="zero"` counts missing ones as zeros."""
    losses, found = [], []
    for replica, module in enumerate(modules):
        module.zero_grad()
        seed(replica, step)
        with torch.jit.optimized_execution(False):
            value = loss(module, rows_of(step, range(replica, replica + 1)))
            value = value[0] if isinstance(value, tuple) else value
            value.backward()
        losses.append(value.detach().reshape(1).float())
        found.append([one.grad for one in module.parameters()])
    means: list[torch.Tensor | None] = []
    for of_parameter in zip(*found, strict=True):
        given = [one for one in of_parameter if one is not None]
        assert missing == "zero" or len(given) in (0, len(modules))
        filled = [torch.zeros_like(given[0]) if one is None else one for one in of_parameter] if given else []
        means.append(mean_of(filled) if given else None)
    return float(mean_of(losses)), means


def seed(replica: int, step: int, micro_batch: int = 0) -> None:
    """Seed all generators as for a replica's micro-batch."""
    from strategies.torch.replicas.generators import seed_generators

    seed_generators(strategies.torch.seed_of(0, replica, step, micro_batch), torch.device("cpu"))


def by_copies(idiom: Idiom, replicas: int, missing: str = "error") -> Found:
    """Train an idiom with a copy of the module for each replica. Each copy is changed by a program of its own."""
    first = drawn(idiom.module)
    modules = [first, *(copy.deepcopy(first) for _ in range(replicas - 1))]
    optimizers = [idiom.optimizer(one) for one in modules]
    programs = [idiom.program(*pair) for pair in zip(modules, optimizers, strict=True)]
    for program in programs:
        next(program)
    losses: list[float] = []
    while programs:
        loss, means = gradients(modules, idiom.loss, len(losses), missing)
        losses.append(loss)
        share(modules)
        for parameter, mean in zip(first.parameters(), means, strict=True):
            parameter.grad = mean
        idiom.options.get("before_update", lambda _: None)(first)
        optimizers[0].step()
        share(modules)
        try:
            for program in programs:
                program.send(loss)
        except StopIteration:
            programs = []
    return [one.detach().clone() for one in first.state_dict().values() if isinstance(one, torch.Tensor)], losses
