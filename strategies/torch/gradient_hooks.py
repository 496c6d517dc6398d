"""Hooks that report each complete gradient of a module's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from strategies.torch.pass_weights import Named

Complete = Callable[[torch.Tensor], None]
"""(parameter whose gradient is complete) -> None. Called by autograd."""


class GradientHooks:
    """The hooks on a module's parameters. They end with this object.

    Args:
        arrived: A method that gets each parameter. Only a weak reference to it is kept, so its object can be freed.
    """

    def __init__(self, arrived: Complete) -> None:
        self._told = partial(_tell, weakref.WeakMethod(arrived))
        self._hooks: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        weakref.finalize(self, _remove, self._hooks)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._hooks

    def follow(self, named: Named) -> None:
        """Add hooks to new parameters, and remove those of parameters that are gone."""
        for gone in self._hooks.keys() - {id(one) for _, one in named}:
            self._hooks.pop(gone)[1].remove()
        for _, one in named:
            if one in self or not one.is_leaf or not (one.is_floating_point() or one.is_complex()):
                continue
            is_trained = one.requires_grad
            one.requires_grad_(True)  # PyTorch refuses hooks on frozen parameters, which may be thawed later
            self._hooks[id(one)] = one, one.register_post_accumulate_grad_hook(self._told)
            one.requires_grad_(is_trained)


def _tell(method: weakref.WeakMethod[Complete], parameter: torch.Tensor) -> None:
    if (arrived := method()) is not None:
        arrived(parameter)


def _remove(hooks: Mapping[int, tuple[torch.Tensor, RemovableHandle]]) -> None:
    for _, hook in hooks.values():
        hook.remove()
