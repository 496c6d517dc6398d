"""Warnings of gradients that are not averaged, although they are gradients of a DistributedModel."""

from __future__ import annotations

import warnings

import torch
from torch.autograd.graph import Node

from strategies.torch.pass_weights import Named

_GRAD, _CALL = "torch.autograd.grad", "torch.func.functional_call"  # functions that a warning is about

_MOST = 3  # parameters named in that warning


class LocalGradients:
    """The warnings of one model, each given once, to the caller of a function of PyTorch."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._nodes: dict[str, Node] = {}  # autograd's nodes that add to gradients of parameters

    def follow(self, named: Named) -> None:
        """Know the parameters that the model has now."""
        self._nodes = {
            name: torch.autograd.graph.get_gradient_edge(one).node for name, one in named if one.requires_grad
        }

    def warn_if_returned(self) -> None:
        """Warn if the running backward pass returns gradients of parameters instead of accumulating them."""
        if _GRAD in self._warned:
            return
        names = [name for name, node in self._nodes.items() if _is_returned(node)]
        if names:
            self._warn(
                _GRAD,
                f"{_GRAD} has returned gradients of {', '.join(names[:_MOST])} of a DistributedModel, which are "
                "those of this instance alone; backward() averages the gradients that it adds to parameters",
            )

    def warn_of_others(self) -> None:
        """Warn that other tensors stand in for the parameters."""
        self._warn(
            _CALL,
            f"other tensors replace the parameters of a DistributedModel, as in {_CALL}; their gradients are not "
            "averaged: they are the gradients of this instance alone",
        )

    def _warn(self, function: str, message: str) -> None:
        if function not in self._warned:
            self._warned.add(function)
            warnings.warn(message, UserWarning, stacklevel=7)


def _is_returned(node: Node) -> bool:
    """Return whether the running backward pass returns the gradient of a node, as `autograd.grad` does.

    PyTorch has no query for this, but raises an error for such a node.
    """
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False
