"""The weights of losses in a training loop of the program: one for each backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from strategies.core.gathering import replicas_where
from strategies.core.weights import ERROR, SKIP, is_weighted, travelling, weighted_means
from strategies.errors import StrategyError, ZeroWeightError
from strategies.jax.replicas.replicas import Replicas
from strategies.torch.exchange.arithmetic import divide
from strategies.torch.tensors import real_views

Named = Sequence[tuple[str, torch.nn.Parameter]]
"""Parameters with their names."""


@dataclass(frozen=True, eq=False)
class PassWeight:
    """The weight of the loss of one backward pass, as it travels."""

    value: float


class PassWeights:
    """The weights of the losses of one replica in a step of the program's loop.

    Attributes:
        stated: The weights that the module has stated in training passes since the last backward pass.
        last: The total of the last step whose backward pass was `loss.backward()` or `weighted_backward`.
        has_passes: Whether there was a backward pass in this step.
    """

    def __init__(self) -> None:
        self.stated: list[object] = []
        self.last: float | None = None
        self.has_passes = False
        self._sum = 0.0
        self._counted: PassWeight | None = None
        self._seen: Mapping[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradients, by their parameters' ids
        self._ended: PassWeight | None = None  # the last pass that has not failed
        self._refusal = ""

    @property
    def total(self) -> float | None:
        """The sum of the weights so far, as it travels; None if the losses have no weights."""
        return None if self._counted is None else float(travelling(self._sum))

    def taken(self) -> list[object]:
        """Return the stated weights, and forget them: the next pass states its own, even if this one fails."""
        found, self.stated[:] = [*self.stated], []
        return found

    def begin(self) -> None:
        """Begin a step."""
        self.stated.clear()
        self._begin_sum()

    def _begin_sum(self) -> None:
        self._sum, self._counted, self.has_passes, self._seen = 0.0, None, False, {}

    def count(self, given: PassWeight | None) -> None:
        """Count a backward pass that adds to a gradient; several calls for one pass count it once.

        Raises:
            StrategyError: If only some of the backward passes of a step have weights, a weight was stated for a pass
                without one, or `look_before` has found gradients that cannot be a part of the mean.
        """
        if self.has_passes and given is self._counted:
            return
        if given is not None and self._refusal:
            raise StrategyError(self._refusal)
        if self.has_passes and (given is None) != (self._counted is None):
            raise StrategyError(
                "some backward passes of a step have weights, by model.weighted_backward(loss, weight) or an Outcome, "
                "and others have none; give all micro-batches of a step weights, or none"
            )
        if given is None and self.stated:
            raise StrategyError(
                "the module has stated the weight of its loss, which loss.backward() does not know; call "
                "model.weighted_backward(loss) in its place"
            )
        self.has_passes, self._counted = True, given
        if given is not None:
            self._sum += given.value

    def look_before(self, named: Named) -> None:
        """Look at the gradients before a weighted pass, which `count` refuses if they cannot be a part of its mean.

        If the gradients of earlier passes of this step are gone, the step begins again.
        """
        self._refusal = ""
        has_ended = self._counted is not None and self._counted is self._ended
        if has_ended and all(self._is_as_seen(one) for _, one in named):
            return
        left = next((name for name, one in named if has_gradient(one)), None)
        if left is None:
            self._begin_sum()
        elif self._counted is not None:
            self._refusal = (
                f"the gradient of {left} was changed between weighted backward passes of a step, where it is a sum of "
                "weighted gradients, or a pass has failed half-way; change gradients after the last pass, or call "
                "optimizer.zero_grad() to begin the step again"
            )
        elif not self.has_passes:
            self._refusal = (
                f"gradients of an earlier step are left, as that of {left}, to which a weighted mean cannot be added; "
                "call optimizer.zero_grad() before model.weighted_backward (or model.zero_grad(), for parameters that "
                "the optimizer lacks), and use no_sync for all micro-batches but the last"
            )

    def look_after(self, named: Named) -> None:
        """Remember the gradients with which a weighted pass has left the step, if the step goes on."""
        self._ended = self._counted
        if self._counted is not None:
            grads = {id(one): one.grad for _, one in named}
            self._seen = {number: (weakref.ref(one), one._version) for number, one in grads.items() if one is not None}

    def _is_as_seen(self, parameter: torch.nn.Parameter) -> bool:
        seen, now = self._seen.get(id(parameter)), parameter.grad
        if seen is None or now is None:
            return seen is None and now is None
        return now._version == seen[1] and now is seen[0]()


def has_gradient(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that is not all zeros."""
    gradient = parameter.grad
    return gradient is not None and bool((gradient._values() if gradient.is_sparse else gradient).any())


class Weighing:
    """The weight of the backward pass that runs, for all models that share a communicator.

    Attributes:
        now: The weight; None for a pass without one.
    """

    def __init__(self) -> None:
        self.now: PassWeight | None = None

    @contextmanager
    def of(self, weight: float, zeroed: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Let backward passes in this context have a weight.

        Args:
            weight: The weight, as it travels.
            zeroed: The parameters whose gradients become zeros, even if they would be NaN.
        """
        self.now = PassWeight(weight)
        # Keep the nodes: PyTorch drops a node without references, and its hook.
        nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in zeroed if one.requires_grad]
        hooks = [node.register_prehook(_zeros) for node in nodes]
        try:
            yield
        finally:
            self.now = None
            for hook in hooks:
                hook.remove()


def _zeros(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def divide_by_weight(gradients: Iterable[torch.Tensor | None], weight: float | None) -> None:
    """Divide the means of weighted gradients by the mean weight, in place; not by a weight that has no quotient."""
    if weight is None or not weight > 0:
        return
    with torch.no_grad():
        own = [one for one in real_views([*gradients]) if one is not None]
        wide = [one.to(torch.promote_types(one.dtype, torch.float32)) for one in own]
        divide(wide, weight)
        for one, exact in zip(own, wide, strict=True):
            if one is not exact:
                one.copy_(exact)


def quotient(mean: float, weight: float | None) -> float:
    """Return the weighted mean of a metric, float32; the mean itself without weights, NaN for the weight 0."""
    return mean if weight is None else float(weighted_means(np.array(mean, np.float32), weight))


def has_mean(weight: float | None, step: int, zero_weight: str) -> bool:
    """Return whether gradients have a mean; False if all weights are 0, and the step is to be skipped.

    Args:
        weight: The mean weight of all losses; None if they have no weights.
        step: The number of steps so far.
        zero_weight: The option `zero_weight`.

    Raises:
        WeightError: On all instances, if a weight is negative or not finite.
        ZeroWeightError: On all instances, if all are 0, and `zero_weight` is "error".
    """
    is_applied = weight is None or is_weighted(weight, step, SKIP)
    if not is_applied and zero_weight == ERROR:
        raise ZeroWeightError(
            f"all replicas and micro-batches have weight 0 at step {step}, so gradients have no mean and are 0; leave "
            "such batches out, catch this error and leave optimizer.step() out, or use zero_weight='skip'"
        )
    return is_applied


def refuse_lacking(replicas: Replicas, weights: Sequence[float | None]) -> NoReturn:
    """Raise on all instances, because the losses of only some replicas have weights. Collective.

    Args:
        replicas: The replicas of all instances.
        weights: The weight of each local replica; None without one.
    """
    lacking = replicas_where(replicas, [one is None for one in weights], "who gives no weight")
    raise StrategyError(
        f"the losses of the replicas {lacking} have no weight, and those of the others have one; call "
        "model.weighted_backward on all of them, or return an Outcome with a weight"
    )
