"""Settings that a program may change between steps on all instances alike; each step compares one small number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from strategies.torch.optimizer_arrays import PARAMS

_WORDS = 64
"""Number of words. Squares are below 2**12, so in float32 sums over 4,096 replicas are exact, and equal means equal."""
_DIFFERENT = 1e-4


class StepSettings:
    """The settings of a training: `requires_grad`, and the numbers and members of the optimizer's groups."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._places = {id(one): place for place, one in enumerate(parameters)}
        self._seen: list[object] = []
        self._hash = 0

    def word(self, step: int) -> int:
        """Return a number below 64 that stands for the settings.

        Different settings have the same number in one of 64 steps, so a difference shows in the first step or soon.
        """
        seen: list[object] = [one.requires_grad for one in self._parameters]
        for group in self._optimizer.param_groups:
            seen += map(id, group[PARAMS])
            seen += [float(one) if _is_scalar(one) else one for name, one in group.items() if name != PARAMS]
        if seen != self._seen:
            self._seen, self._hash = seen, self._hashed()
        return word_of(step, self._hash)

    def _hashed(self) -> int:
        groups = (
            (
                tuple(_number(value) for name, value in group.items() if name != PARAMS),
                tuple(self._places.get(id(one), -1) for one in group[PARAMS]),
            )
            for group in self._optimizer.param_groups
        )
        return hash((tuple(one.requires_grad for one in self._parameters), *groups))


def word_of(step: int, number: int) -> int:
    """Return a number below 64 for `number`; it is the same for two different numbers in one of 64 steps."""
    return hash((step, number)) % _WORDS


def settings_in_words(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the settings in words, by name."""
    found = {name: "trained" if one.requires_grad else "frozen" for name, one in module.named_parameters()}
    places = {id(one): name for name, one in module.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        members = [places.get(id(one), "another") for one in group[PARAMS]]
        values = {name: _number(value) for name, value in group.items()} | {PARAMS: ", ".join(members)}
        found |= {f"{name} of optimizer group {number}": f"= {value}" for name, value in values.items()}
    return found


def differ(words: float, squares: float) -> bool:
    """Return whether the numbers of replicas differ, from the mean of their words and that of the squares."""
    return squares - words * words > _DIFFERENT


def _number(value: object) -> object:
    """Return a value in a form with the same hash in every process; strings, None and NaN have none."""
    if isinstance(value, bool | int | float) and value == value:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_number, value))
    return float(value) if _is_scalar(value) else 0


def _is_scalar(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1
