"""The weights of losses in a training loop of the program: one for each backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from strategies.core.weights import SKIP, is_weighted, weighted_means
from strategies.errors import StrategyError, ZeroWeightError
from strategies.torch.gradient_map import GradientMap


@dataclass(frozen=True, eq=False)
class PassWeight:
    """The weight of the loss of one backward pass, as it travels."""

    value: float


class PassWeights:
    """The weights of the losses of one replica in a step of the program's loop.

    Attributes:
        total: The sum of the weights so far, float32; None if the losses have no weights.
        stated: The weights that the module has stated in training passes since the last backward pass.
        last: The total of the last step whose backward pass was `loss.backward()` or `weighted_backward`.
        has_passes: Whether there was a backward pass in this step.
    """

    def __init__(self) -> None:
        self.total: float | None = None
        self.stated: list[object] = []
        self.last: float | None = None
        self.has_passes = False
        self._counted: PassWeight | None = None

    def begin(self) -> None:
        """Begin a step."""
        self.total, self._counted, self.has_passes = None, None, False
        self.stated.clear()

    def count(self, given: PassWeight | None) -> None:
        """Count a backward pass that adds to a gradient; several calls for one pass count it once.

        Raises:
            StrategyError: If only some of the backward passes of a step have weights, or a weight was stated for a pass
                without one.
        """
        if self.has_passes and given is self._counted:
            return
        if self.has_passes and (given is None) != (self._counted is None):
            raise StrategyError(
                "some backward passes of a step are model.weighted_backward(loss, weight), and others loss.backward(); "
                "use one of the two for all micro-batches of a step"
            )
        if given is None and self.stated:
            raise StrategyError(
                "the module has stated the weight of its loss, which loss.backward() does not know; call "
                "model.weighted_backward(loss) in its place"
            )
        self.has_passes, self._counted = True, given
        if given is not None:
            self.total = float(np.float32((self.total or 0.0) + given.value))


class Weighing:
    """The weight of the backward pass that runs, for all models that share a communicator.

    Attributes:
        now: The weight; None for a pass without one.
    """

    def __init__(self) -> None:
        self.now: PassWeight | None = None
        self._zeros = GradientMap(None)
        self._hooked: set[int] = set()

    @contextmanager
    def of(self, weight: float, zeroed: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Let backward passes in this context have a weight.

        Args:
            weight: The weight, as it travels.
            zeroed: The parameters whose gradients become zeros, even if they would be NaN.
        """
        self.now = PassWeight(weight)
        self._hook(zeroed)
        self._zeros.begin(0, 1.0, 1, 0.0 if zeroed else None)
        try:
            yield
        finally:
            self.now = None
            self._zeros.begin(0, 1.0, 1)

    def _hook(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for one in parameters:
            node = torch.autograd.graph.get_gradient_edge(one).node if one.requires_grad else None
            if node is not None and id(node) not in self._hooked:  # nodes stay alive, so ids are not used again
                self._hooked.add(id(node))
                self._zeros.attach(one, one)


def divide(gradients: Iterable[torch.Tensor | None], weight: float | None) -> None:
    """Divide the means of weighted gradients by the mean weight, in place; not by a weight that has no quotient."""
    if weight is None or not weight > 0:
        return
    with torch.no_grad():
        for one in gradients:
            if one is not None:
                one.copy_(one.to(torch.promote_types(one.dtype, torch.float32)) / weight)


def quotient(mean: float, weight: float | None) -> float:
    """Return the weighted mean of a metric, float32; the mean itself without weights, NaN for the weight 0."""
    return mean if weight is None else float(weighted_means(np.array(mean, np.float32), weight))


def refuse_without_mean(weight: float | None, step: int) -> None:
    """Raise if weights have no mean, on all instances.

    Raises:
        WeightError: If a weight is negative or not finite.
        ZeroWeightError: If all are 0.
    """
    if weight is not None and not is_weighted(weight, step, SKIP):
        raise ZeroWeightError(
            f"all replicas and micro-batches have weight 0 at step {step}, so gradients have no mean and are 0; leave "
            "such batches out, or catch this error and leave optimizer.step() out"
        )
