"""Batch normalisation by the statistics of the values that all replicas have, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

AddRows = Callable[[str, torch.Tensor], torch.Tensor]
"""(what, row of float64) -> the sum of the rows of all replicas."""


def normalised(layer: torch.nn.SyncBatchNorm, x: torch.Tensor, add: AddRows) -> torch.Tensor:
    """Normalise a replica's values for a layer in training mode, and update its running statistics.

    Outputs, gradients and running statistics are those of a BatchNorm on the values of all replicas together.
    Statistics are taken in float32, of float64 in float64, and added in float64. Replicas count by their values, and
    may have none.

    Args:
        layer: of this replica.
        x: shape [N, C, ...].
        add: called by all replicas in the same order.

    Raises:
        ValueError: for a shape that the layer does not take, or if all replicas together have one value or none.
    """
    layer._check_input_dim(x)
    layer._check_non_zero_input_channels(x)
    with torch.no_grad():
        mean, variance, count = _statistics(x.detach(), add)
        if layer.track_running_stats:
            _track(layer, mean, variance * (count / (count - 1)))
    normalise: Any = _Normalise.apply
    result: torch.Tensor = normalise(
        x, layer.weight, layer.bias, mean, variance, count, layer.eps, partial(add, "backward")
    )
    return result


def _statistics(x: torch.Tensor, add: AddRows) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean and variance, float64 [C], of all replicas' values in each channel, and the number of values."""
    channels = x.shape[1]
    own = x.numel() // channels
    mean = variance = torch.zeros(channels, dtype=torch.float64, device=x.device)
    if own:
        zeros = torch.zeros(channels, dtype=_wide(x.dtype), device=x.device)
        found = torch.batch_norm_update_stats(x, zeros, torch.ones_like(zeros), 0.0)
        mean, variance = (one.double() for one in found)
    number = torch.tensor([own], dtype=torch.float64, device=x.device)
    total = add("forward", torch.cat([mean * own, (variance + mean.square()) * own, number]))
    count = float(total[-1])
    if count < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {count:g} of all replicas together, input size "
            f"{list(x.shape)}"
        )
    of_all, squares = total[:channels] / count, total[channels:-1] / count
    if x.dtype != torch.float64:
        return of_all, (squares - of_all.square()).clamp(min=0), count
    deviations = (variance + (mean - of_all).square()) * own  # float64 has no digits left for squares of large numbers
    return of_all, add("forward, variances", deviations) / count, count


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of such values are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _track(layer: torch.nn.SyncBatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    factor = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    for running, now in ((layer.running_mean, mean), (layer.running_var, variance)):
        if running is not None:
            running.copy_(running.double().lerp(now, factor))


class _Normalise(torch.autograd.Function):
    """Batch normalisation by statistics that all replicas have in common."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: float,
        eps: float,
        add: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        wide = _wide(x.dtype)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.eps, ctx.add = count, eps, add
        scale, offset = (None if one is None else one.to(wide) for one in (weight, bias))
        return F.batch_norm(x, mean.to(wide), variance.to(wide), scale, offset, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        wide, channels = _wide(x.dtype), x.shape[1]
        deviation = (variance + ctx.eps).rsqrt()
        mean, inverse = mean.to(wide), deviation.to(wide)
        by_weight = by_bias = torch.zeros(channels, dtype=wide, device=x.device)
        if x.numel():
            only_sums = [False, True, True]
            _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, torch.ones_like(mean), None, None, mean, inverse, True, ctx.eps, only_sums
            )
        gradient = None
        if ctx.needs_input_grad[0]:
            total = ctx.add(torch.cat([by_weight, by_bias]).double()) / ctx.count
            shape = [1, channels] + [1] * (x.dim() - 2)
            along, constant = ((one.to(wide)).view(shape) for one in (total[:channels] * deviation, total[channels:]))
            scale = inverse if weight is None else inverse * weight.to(wide)
            gradient = (x - mean.view(shape)).mul_(along).add_(constant)
            gradient = torch.sub(dy, gradient, out=gradient).mul_(scale.view(shape)).to(x.dtype)
        to_weight = by_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        to_bias = by_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return gradient, to_weight, to_bias, None, None, None, None, None
