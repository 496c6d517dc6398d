"""The states of a sampler's own random generators, which checkpoints keep."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import Sampler

from strategies.typing import Tree

_ROWS = "data_source"
"""The attribute in which samplers of PyTorch keep the data set."""


class _WithState(Protocol):
    """A sampler that offers its state, as those of torchdata do."""

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> None: ...


_Stateful: TypeAlias = (
    torch.Generator | random.Random | np.random.RandomState | np.random.Generator | np.random.BitGenerator | _WithState
)


def states_of(sampler: object) -> dict[str, Tree]:
    """Return the states that decide which order a sampler draws next, by the names of attributes.

    These are the states of random generators of PyTorch, NumPy and Python in attributes of the sampler, of samplers in
    it, and of lists, tuples and dictionaries there. A sampler with `state_dict` and `load_state_dict` has the state
    that it returns. `torch.load(weights_only=True)` reads them.

    Args:
        sampler: The sampler, or another iterable; or a dictionary of generators.
    """
    return {name: _state_of(one) for name, one in _stateful(sampler, "", set(), not isinstance(sampler, dict))}


def write_states(sampler: object, states: Mapping[str, Tree]) -> None:
    """Set the states that `states_of` has returned. States of attributes that are missing are left out."""
    for name, one in _stateful(sampler, "", set(), not isinstance(sampler, dict)):
        if name in states:
            _set_state(one, states[name])


def _stateful(value: Tree, name: str, known: set[int], is_sampler: bool) -> Iterator[tuple[str, _Stateful]]:
    """Yield the objects with a state in a value, each once, and their names."""
    if id(value) in known:
        return
    known.add(id(value))
    if _is_generator(value) or (is_sampler and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        yield name, value
        return
    if is_sampler:
        inside = [(one, part) for one, part in getattr(value, "__dict__", {}).items() if one != _ROWS]
    else:
        inside = list(value.items() if isinstance(value, dict) else enumerate(value))
    for one, part in inside:
        if _is_generator(part) or isinstance(part, Sampler | list | tuple | dict):
            yield from _stateful(part, f"{name}.{one}", known, isinstance(part, Sampler))


def _is_generator(value: object) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return isinstance(value, torch.Generator | np.random.RandomState | np.random.Generator | np.random.BitGenerator)


def _state_of(value: _Stateful) -> Tree:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return _plain(value.get_state(legacy=False))
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return _plain(value.state)
    return value.state_dict()


def _set_state(value: _Stateful, state: Tree) -> None:
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, np.random.BitGenerator):
        value.state = state
    else:
        value.load_state_dict(state)


def _plain(state: Tree) -> Tree:
    """Return a state of NumPy with lists in place of arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    return {name: _plain(one) for name, one in state.items()} if isinstance(state, dict) else state
