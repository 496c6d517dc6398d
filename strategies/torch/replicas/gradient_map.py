"""The program's function that changes gradients on each replica, `map_gradient`, and zeros for the weight 0."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from strategies.errors import StrategyError

MapGradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(gradient, parameter) -> gradient."""


class GradientMap:
    """The map of one replica's gradients, applied before they are summed.

    The function gets gradients without the loss scale and the weight of the loss, not yet divided by the number of
    micro-batches. If the weight is 0, gradients become zeros, even those that are not finite.

    Args:
        function: The function `map_gradient` of the options; None to change only gradients of the weight 0.
        keeps_bad: Whether elements that are not finite stay so, for a later check.
        at_once: Number of micro-batches whose backward passes run at the same time, in a pipeline.

    Attributes:
        is_attached: Whether gradients are mapped now.
    """

    def __init__(self, function: MapGradient | None, keeps_bad: bool = False, at_once: int = 1) -> None:
        self._function = function
        self._keeps_bad = keeps_bad
        self._at_once = at_once
        self._scale, self._divisor = 1.0, 1
        self._weight: float | None = None
        self._weights: dict[int, float | None] = {}  # of micro-batches that run at the same time, by their threads
        self.is_attached = False
        self._calls: Counter[int] = Counter()

    @contextmanager
    def attached(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
        """Map the gradients added to the `grad` of a replica's parameters, but not results of `autograd.grad`.

        Args:
            pairs: The module's parameters, each with that of the replica. The function gets the module's if both are
                the same or share memory.
        """
        nodes = [get_gradient_edge(mine).node for _, mine in pairs]  # PyTorch drops a node without references
        hooks = [
            node.register_prehook(partial(_mapped, self, original, mine))
            for node, (original, mine) in zip(nodes, pairs, strict=True)
        ]
        self.is_attached = True
        try:
            yield
        finally:
            self.is_attached = False
            for hook in hooks:
                hook.remove()

    def begin(self, number: int, scale: float, divisor: int, weight: float | None = None) -> None:
        """Set the scale of a micro-batch's loss, and the divisor and weight that the map applies to its gradients.

        The thread that calls this runs the micro-batch's backward pass.
        """
        self._scale, self._divisor = scale, divisor
        self._weight = self._weights[threading.get_ident()] = weight
        if self._at_once == 1 or number == 0:
            self._calls.clear()

    def __call__(self, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient to be added, in memory of its own.

        Raises:
            TypeError: If the function returns no tensor.
            ValueError: If the function returns another shape.
            StrategyError: If the function writes to the gradient, or gets parts of it one after another.
        """
        weight = self._weight if self._at_once == 1 else self._weights[threading.get_ident()]
        if weight == 0:
            return torch.zeros_like(gradient)
        if self._function is None:
            return gradient
        self._count(parameter)
        plain = gradient
        if self._scale != 1:
            plain = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / self._scale
        version = plain._version
        new = self._function(plain, parameter)
        _refuse_others(new, plain)
        if plain._version != version:
            raise StrategyError(
                "map_gradient writes to the gradient that it gets, which autograd may use elsewhere; return a new "
                "tensor, as gradient.clamp(-1, 1) in place of gradient.clamp_(-1, 1)"
            )
        new = new.to(plain.dtype)
        if self._keeps_bad:
            new = torch.where(plain.isfinite(), new, plain)
        return (new * self._scale / self._divisor * (1.0 if weight is None else weight)).to(gradient.dtype)

    def _count(self, parameter: torch.Tensor) -> None:
        self._calls[id(parameter)] += 1
        if self._calls[id(parameter)] > self._at_once:
            raise StrategyError(
                f"map_gradient needs the whole gradient of a micro-batch, but the gradient of a parameter of shape "
                f"{list(parameter.shape)} comes in parts, as it does if several reentrant checkpoints use it; use "
                "checkpoint(..., use_reentrant=False)"
            )


def multiplied(function: MapGradient, factor: int) -> MapGradient:
    """Return a function whose results are `factor` times as large."""
    return function if factor == 1 else lambda gradient, parameter: factor * function(gradient, parameter)


def _mapped(
    own: GradientMap, original: torch.Tensor, mine: torch.Tensor, gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Map a gradient. Autograd calls this."""
    gradient = gradients[0]
    if gradient is None:
        return tuple(gradients)
    is_same = original.data_ptr() == mine.data_ptr() and original.shape == mine.shape
    return (own(gradient, original if is_same else mine),)


def _refuse_others(new: object, gradient: torch.Tensor) -> None:
    if not isinstance(new, torch.Tensor):
        raise TypeError(f"map_gradient returns a {type(new).__name__}; it must return the gradient, a tensor")
    if new.shape != gradient.shape:
        raise ValueError(
            f"map_gradient returns shape {list(new.shape)} for a gradient of {list(gradient.shape)}; it must return a "
            "tensor of the gradient's shape"
        )
