"""The state of a PyTorch optimizer as a tree of arrays, for checkpoints and for other instances."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from strategies.errors import StrategyError
from strategies.torch.tensors import as_tensor, complex_view, host_array, real_view
from strategies.typing import Number, Tree

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
_NUMBERS = (bool, int, float)

ArraysByName = dict[str, np.ndarray]
"""The state of an optimizer for one parameter."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in the order of the numbers in its `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]


def numbers_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Tree]]:
    """Return the hyperparameters of each group as arrays of no axes, tuples as lists, without None and strings.

    `params` holds the numbers of the group's parameters, as in a `state_dict`.
    """
    found, first = [], 0
    for group in optimizer.param_groups:
        named = {name: _as_number(value) for name, value in group.items() if name != PARAMS}
        numbers = {name: value for name, value in named.items() if value is not None}
        count = len(group[PARAMS])
        found.append({**numbers, PARAMS: np.arange(first, first + count, dtype=np.int64)})
        first += count
    return found


def set_numbers(optimizer: torch.optim.Optimizer, groups: Tree) -> None:
    """Restore the hyperparameters that `numbers_of_groups` has returned."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        for name, value in numbers.items():
            if name == PARAMS:
                continue
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(as_tensor(np.asarray(value)))
            else:
                group[name] = plain_number(value)


def state_of(optimizer: torch.optim.Optimizer) -> dict[int, ArraysByName]:
    """Return the arrays of each parameter's state, by the parameter's number. Tensors on the host are not copied.

    Raises:
        StrategyError: If the state holds other values than tensors, numbers and None.
    """
    found = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        if parameter in optimizer.state:
            found[number] = dict(_arrays(optimizer, number, optimizer.state[parameter]))
    return found


def set_state(optimizer: torch.optim.Optimizer, arrays: Mapping[int, ArraysByName]) -> None:
    """Restore a state from copies of arrays. The optimizer's state for other parameters is dropped.

    Each value becomes a tensor, a number or None: whichever the optimizer has in its place, now or after a step.

    Args:
        optimizer: The optimizer to change.
        arrays: Arrays as `state_of` returns them.
    """
    parameters, like = parameters_of(optimizer), _kinds_of(optimizer)
    if arrays.keys() - like.keys():
        like = {**_kinds_of(after_one_step(optimizer)), **like}
    optimizer.state.clear()
    for number, of_parameter in arrays.items():
        kinds = like[number]
        nothing = {name: None for name, kind in kinds.items() if kind is None}
        named = of_parameter.items()
        values = {name: _value(array, kind) for name, array in named if (kind := kinds[name]) is not None}
        if parameters[number].is_complex():
            whole = (*parameters[number].shape, 2)
            values |= {name: complex_view(one) for name, one in values.items() if np.shape(one) == whole}
        optimizer.state[parameters[number]] = values | nothing


def _kinds_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, torch.device | type | None]]:
    """Return the kinds of the values in the state: the device of a tensor, a kind of number, or None for no value."""
    return {
        number: {
            name: None if value is None else value.device if isinstance(value, torch.Tensor) else type(value)
            for name, value in optimizer.state[parameter].items()
        }
        for number, parameter in enumerate(parameters_of(optimizer))
        if parameter in optimizer.state
    }


def after_one_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of the optimizer that has made a step with gradients of zero, on other parameters.

    PyTorch's optimizers create their state in the first step, so the copy shows the form of the state.
    """
    parameters = parameters_of(optimizer)
    others = {id(one): torch.nn.Parameter(torch.zeros_like(one), one.requires_grad) for one in parameters}
    groups = [{**group, PARAMS: [others[id(one)] for one in group[PARAMS]]} for group in optimizer.param_groups]
    clone = copy.copy(optimizer)
    clone.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": type(optimizer.state)(dict)}
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        clone.__dict__[hooks] = {}
    for one in others.values():
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    type(optimizer).step(clone)
    return clone


def _arrays(
    optimizer: torch.optim.Optimizer, number: int, state: Mapping[str, object]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield name, host_array(real_view(value))
        elif isinstance(value, _NUMBERS):
            yield name, np.asarray(value)
        elif value is not None:
            raise StrategyError(
                f"{type(optimizer).__name__} keeps a {type(value).__name__} ({name}) for parameter {number}; only "
                "tensors and numbers can be saved and sent to other instances"
            )


def _as_number(value: object) -> Tree:
    """Return a number as an array, or a list of numbers as a list of arrays; None for other values."""
    if isinstance(value, tuple | list):
        found = [_as_number(one) for one in value]
        return None if not found or any(one is None for one in found) else found
    if isinstance(value, torch.Tensor):
        return host_array(value).copy()
    return np.asarray(value) if isinstance(value, _NUMBERS) else None


def plain_number(value: Tree) -> Number | tuple[Number, ...]:
    """Return a Python number for an array of no axes, or a tuple of numbers for a list of them."""
    return tuple(plain_number(one) for one in value) if isinstance(value, list | tuple) else np.asarray(value).item()


def _value(array: np.ndarray, kind: torch.device | type) -> torch.Tensor | Number:
    if isinstance(kind, torch.device):
        return as_tensor(np.array(array)).to(kind)
    found: Number = kind(np.asarray(array).item())
    return found
