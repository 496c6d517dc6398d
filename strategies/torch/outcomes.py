"""The results of a loss function for one replica and one micro-batch, and the weight of its loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch

from strategies.argument_checks import refuse_name_of_loss
from strategies.core.weights import travelling
from strategies.errors import StrategyError
from strategies.outcome import Outcome
from strategies.torch.threads import Being, ThreadValue
from strategies.typing import Number, Tree

WEIGHT = "weight of the loss"
"""The last name of the values that travel behind gradients, if losses have weights."""

_stated = ThreadValue[list[object] | None](None)


def loss_weight(weight: Number) -> None:
    """State the weight of the loss that the calling replica computes now, as `strategies.Outcome(weight=...)` does.

    For modules that return their own loss: call it in `forward`. It has an effect in a loss function of
    `strategies.torch.Trainer`, in a training model of PopTorch's interface, and in a training pass of a
    `DistributedModel`. Elsewhere it does nothing, so the module works in plain PyTorch too.

        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)  # the mean over some tokens
        strategies.torch.loss_weight((labels != -100).sum())

    Args:
        weight: A finite number of at least 0, or a tensor with one; see `strategies.Outcome`.
    """
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        warnings.warn(
            "strategies.torch.loss_weight is no part of a traced or exported module, which states no weight and would "
            "train without; train the module itself, or return the weight from the loss function, in an Outcome",
            UserWarning,
            stacklevel=2,
        )
    if _stated.now is not None:
        _stated.now.append(weight)


def is_asked_for() -> bool:
    """Return whether somebody collects the weights that are stated in this thread."""
    return _stated.now is not None


def states_to(weights: list[object]) -> Being[list[object] | None]:
    """Return a context in which weights that are stated in this thread are appended to a list."""
    return _stated.being(weights)


def one_of(weights: list[object], way_out: str) -> object:
    """Return the only weight that was stated for a loss; None if none was.

    Raises:
        StrategyError: If there are several.
    """
    if len(weights) > 1:
        raise StrategyError(f"{len(weights)} weights were stated for one loss; {way_out}")
    return weights[0] if weights else None


def outcome_of(function: Callable[[], Tree]) -> Outcome:
    """Call a loss function, and return its results. The weight is a number as it travels, or None.

    Raises:
        TypeError: If a result has a wrong type, or the loss or the weight is no scalar.
        StrategyError: If the function has stated several weights.
    """
    stated: list[object] = []
    with states_to(stated):
        returned = function()
    if isinstance(returned, Outcome):
        found = returned
    else:
        parts = returned if isinstance(returned, tuple) and len(returned) in (2, 3) else (returned,)
        found = Outcome(parts[0], parts[1] if len(parts) > 1 else {}, outputs=parts[2] if len(parts) > 2 else None)
    if found.model_state is not None:
        raise TypeError(
            "the Outcome has a model_state, but the buffers of a PyTorch module are its model state; leave it out"
        )
    if not isinstance(found.metrics, Mapping):
        raise TypeError(f"the metrics are a {type(found.metrics).__name__}; return (loss, dictionary of scalars)")
    refuse_name_of_loss(found.metrics)
    given = [] if found.weight is None else [found.weight]
    weight = one_of([*given, *stated], "return it in the Outcome, or state it once with strategies.torch.loss_weight")
    return Outcome(found.loss, found.metrics, None, found.outputs, None if weight is None else number_of(weight))


def refuse_losses(loss: object) -> None:
    """Raise unless a loss can be trained.

    Raises:
        TypeError: If the loss is no floating-point scalar, or depends on no parameter.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"a {loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"the loss is {what}; return a floating-point scalar, or (scalar, dictionary of scalars)")
    if not loss.requires_grad:
        raise TypeError("the loss depends on no trained parameter; compute it from the outputs of the module")


def number_of(weight: object) -> float:
    """Return a weight as it travels: float32, NaN for a negative or non-finite one. Waits for a device.

    Raises:
        TypeError: If the weight is no real scalar.
    """
    given: Number = weight
    is_array = isinstance(weight, torch.Tensor | np.ndarray)
    try:
        if isinstance(weight, str) or (isinstance(weight, torch.Tensor) and weight.is_complex()):
            raise TypeError(f"a {type(weight).__name__} is no real number")
        if str(getattr(weight, "dtype", "")).removeprefix("torch.") in ("float16", "bfloat16"):  # NumPy's, too
            raise TypeError("16 bits round counts of tokens")
        number = float(given.detach() if isinstance(weight, torch.Tensor) else given)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"{given.dtype}{list(given.shape)}" if is_array else f"{weight!r}, a {type(weight).__name__}"
        raise TypeError(
            f"the weight of the loss is {what}; give a real scalar of 32 or 64 bits, such as the number of tokens: "
            "mask.sum()"
        ) from error
    return float(travelling(number))


def weighted_loss(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a loss times its weight, in float32 at least. The weight is a constant."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight


def refuse_where_replicas_meet(loss: torch.Tensor, weight: float, is_mapped: bool) -> None:
    """Raise if a weight cannot be heeded because layers such as SyncBatchNorm compute with the rows of all replicas.

    Raises:
        StrategyError: If gradients are mapped, or the weight is 0 and the loss is not finite.
    """
    if is_mapped:
        raise StrategyError(
            "losses have weights, map_gradient changes the gradients of each replica, and SyncBatchNorm mixes the "
            "gradients of all losses before; use BatchNorm, or leave map_gradient or the weights out"
        )
    if weight == 0 and not bool(torch.isfinite(loss.detach())):
        raise StrategyError(
            f"a loss of the weight 0 is {float(loss.detach())}, and SyncBatchNorm would spread it to the gradients of "
            "all replicas; return a finite loss for rows without weight, or use BatchNorm"
        )


def weighted_value(value: float, weight: float | None) -> float:
    """Return a metric times the weight of its loss; 0 for a weight of 0, even if the metric is NaN."""
    if weight is None:
        return value
    return weight * value if weight else 0.0


def are_weighted(names: tuple[str, ...]) -> bool:
    """Return whether losses have weights, given the names of the values that travel behind gradients."""
    return names[-1:] == (WEIGHT,)
