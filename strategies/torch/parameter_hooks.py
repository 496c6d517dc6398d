"""Hooks that the program has registered on parameters, run on the gradients of each replica.

As with DistributedDataParallel they see the gradient of one replica, before the mean. They run in the replicas'
threads, several at once.
"""

from __future__ import annotations

import torch


class ParameterHooks:
    """The hooks of a parameter of the original module, for a parameter of a replica.

    Args:
        original: on which the program registers and removes hooks, at any time.
        mine: the replica's, which has none of them.
    """

    def __init__(self, original: torch.Tensor, mine: torch.Tensor) -> None:
        self._original = original
        self._mine = mine
        self._is_installed = False

    def follow(self) -> None:
        """Have the hooks on gradients run, if there are any by now."""
        if self._original._backward_hooks and not self._is_installed and self._mine.requires_grad:
            self._is_installed = True
            self._mine.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Run the hooks of `Tensor.register_hook` on a complete gradient, and return the result."""
        for hook in tuple((self._original._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def after_accumulation(self) -> None:
        """Run the hooks of `Tensor.register_post_accumulate_grad_hook` on the replica's parameter."""
        hooks = self._original._post_accumulate_grad_hooks
        for hook in tuple(hooks.values()) if hooks else ():
            hook(self._mine)
