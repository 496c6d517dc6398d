"""When the updates of a model began and ended, as PopTorch's performance counters tell it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import jax
import torch

from strategies.errors import StrategyError
from strategies.roles import Tree

Latency = tuple[float, float, float]
"""Seconds: least, most and mean."""


class Counters:
    """Of the last call of a model: its updates, or an inference as a whole.

    Tensors are computed with where they stand, so each is there when it is asked for.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._inputs = self._outputs = 0

    def begin(self, inputs: Tree) -> None:
        """A call begins with these rows."""
        self._spans = []
        self._inputs, self._outputs = _tensors_in(inputs), 0

    def add(self, began_s: float, ended_s: float) -> None:
        """An update was made."""
        self._spans.append((began_s, ended_s))

    def end(self, outputs: Tree) -> None:
        """The call returns these."""
        self._outputs = _tensors_in(outputs)

    def events(self) -> dict[str, list[list[float]]]:
        """For each kind of event, each tensor and each update the second; one empty list for what there is none of."""
        began = [[span[0] for span in self._spans] for _ in range(self._inputs)] or [[]]
        ended = [[span[1] for span in self._spans] for _ in range(self._outputs)] or [[]]
        return {
            "input": began,
            "input_complete": [list(each) for each in began],
            "output": ended,
            "output_complete": [list(each) for each in ended],
        }

    def of_updates(self) -> Latency:
        """How long they took.

        Raises:
            StrategyError: if there was no call.
        """
        return self._over_updates(lambda began_s, ended_s: ended_s - began_s)

    def of_transfers(self) -> Latency:
        """How long tensors were on their way: no time.

        Raises:
            StrategyError: if there was no call.
        """
        return self._over_updates(lambda began_s, ended_s: 0.0)

    def _over_updates(self, seconds_of: Callable[[float, float], float]) -> Latency:
        if not self._spans:
            raise StrategyError("the model was not called, so nothing has taken time; call it first")
        seconds = [seconds_of(*span) for span in self._spans]
        return min(seconds), max(seconds), fmean(seconds)


def _tensors_in(tree: Tree) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(tree))
