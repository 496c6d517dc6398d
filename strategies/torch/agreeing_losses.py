"""Mean losses of all instances for optimizers that decide by the loss, such as LBFGS, so that all decide alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strategies.replicas.replicas import Replicas
from strategies.torch.optimizer_arrays import parameters_of


class Averaging(Protocol):
    """An object that averages the gradients of some parameters."""

    def averages(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradients of a parameter are averaged."""


def agree_on_losses(averaging: Averaging, replicas: Replicas) -> None:
    """Have closures of optimizers return the mean loss from here on, where their gradients are averaged.

    The optimizers of `torch.optim` other than LBFGS do nothing with the loss but return it, so theirs stays local.

    Args:
        averaging: of the parameters; not kept alive.
        replicas: connects the instances, one replica each.
    """
    hook = register_optimizer_step_pre_hook(partial(_before_step, weakref.ref(averaging), replicas))
    weakref.finalize(averaging, hook.remove)


def _before_step(
    averaging: weakref.ref[Averaging],
    replicas: Replicas,
    optimizer: torch.optim.Optimizer,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the closure among the arguments of `step`, of which PyTorch hands over the optimizer first."""
    if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS):
        return None
    known = averaging()
    if known is None or not any(map(known.averages, parameters_of(optimizer))):
        return None
    if named.get("closure") is not None:
        return arguments, named | {"closure": partial(_mean_loss, named["closure"], replicas)}
    if len(arguments) > 1 and arguments[1] is not None:
        return (optimizer, partial(_mean_loss, arguments[1], replicas), *arguments[2:]), named
    return None


def _mean_loss(closure: Callable[[], Any], replicas: Replicas) -> torch.Tensor:
    given = closure()
    loss = given.detach() if isinstance(given, torch.Tensor) else given
    mean = replicas.communicator.ordered_all_reduce([np.array(float(loss))], op="mean", name="loss of a closure")
    return torch.tensor(float(mean), dtype=loss.dtype if isinstance(loss, torch.Tensor) else None)
