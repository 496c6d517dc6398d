"""Gradients on a device in the flat buffers that travel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from strategies.torch.gradient_exchange import TorchGradientPlan
from strategies.torch.on_device.arithmetic import torch_dtype


def flat_buffers(
    plan: TorchGradientPlan, gradients: Sequence[torch.Tensor | None], device: torch.device
) -> list[torch.Tensor]:
    """Return the buffers of a plan with one bucket, with zeros for missing gradients. Autograd must be off.

    A gradient that has a buffer alone may become that buffer without a copy; others are copied.

    Args:
        plan: The plan of the gradients.
        gradients: Dense gradients, in the order of the plan's parameters.
        device: The device of the gradients.
    """
    alone = {place.buffer: gradients[number] for number, place in enumerate(plan.places) if place.is_of_one}
    buffers = []
    for number, buffer in enumerate(plan.layouts[0].buffers):
        dtype, own = torch_dtype(buffer.dtype), alone.get(number)
        flat = torch.zeros(buffer.size, dtype=dtype, device=device) if own is None else own.to(dtype).reshape(-1)
        buffers.append(flat)
    into, small = [], []
    for view, place, gradient in zip(gradients_in(plan, buffers), plan.places, gradients, strict=True):
        if gradient is not None and not place.is_of_one:
            into.append(view)
            small.append(gradient)
    if small:
        torch._foreach_copy_(into, small)
    return buffers


def gradients_in(plan: TorchGradientPlan, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients in the buffers of a plan, as views."""
    return [
        buffers[place.buffer][place.start : place.start + math.prod(parameter.shape)].view(tuple(parameter.shape))
        for place, parameter in zip(plan.places, plan.parameters, strict=True)
    ]
