"""Detection of optimizers that use gradients left in networks outside of the trainer's module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strategies.errors import StrategyError


@dataclass(frozen=True)
class _Left:
    """A gradient that replicas have left.

    Attributes:
        gradient: The tensor, which others may drop.
        version: PyTorch's counter of writes to it.
        name: The parameter and its network in words.
    """

    gradient: weakref.ref[torch.Tensor]
    version: int
    name: str


class LeftGradients:
    """The gradients that backward passes of replicas leave in parameters outside of the trainer's module.

    Nothing adds those of other instances. An optimizer that steps with one of them is refused. A gradient that the
    program has replaced or written since is its own.
    """

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, str, torch.Tensor | None, int]] = []
        self._left: dict[int, _Left] = {}
        self._is_watching = False

    def begin(self, parameters: Iterable[tuple[torch.Tensor, str]], more: bool = False) -> None:
        """Record the gradients before a step; each parameter comes with its name in words. `more` adds to others."""
        found = [(one, name, one.grad, _version_of(one.grad)) for one, name in parameters]
        self._before = [*self._before, *found] if more else found

    def end(self) -> None:
        """Remember the gradients that the step has left, and watch all optimizers from the first one on."""
        for parameter, name, gradient, version in self._before:
            now = parameter.grad
            if now is not None and (now is not gradient or _version_of(now) != version):
                self._left[id(parameter)] = _Left(weakref.ref(now), now._version, name)
        self._before = []
        if self._left and not self._is_watching:
            self._is_watching = True
            left = self._left
            handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _refuse_left(optimizer, left))
            weakref.finalize(self, handle.remove)


def _version_of(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _refuse_left(optimizer: torch.optim.Optimizer, left: dict[int, _Left]) -> None:
    """Raise if an optimizer is about to use a gradient that replicas have left."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            one = left.get(id(parameter))
            gradient = parameter.grad
            is_left = one is not None and gradient is not None and gradient is one.gradient()
            if one is not None and is_left and _version_of(gradient) == one.version:
                raise StrategyError(
                    f"{type(optimizer).__name__} would use a gradient that the loss function of a Trainer has left in "
                    f"the {one.name}, which is outside of the Trainer's module. It is no mean over all replicas: each "
                    "instance has its own; put both networks into the Trainer's module, or call zero_grad() and "
                    "compute the gradients of this network by themselves (docs: torch_modules, Networks outside of "
                    "the module)"
                )
