"""Contents of a module's attributes, such as lists, dictionaries and arrays, that a program may change in place."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace

import numpy as np
import torch

from strategies.jax.programs.remembering import SCALARS, digest
from strategies.jax.programs.users_code import is_users_module

_OF_MODULES = frozenset(vars(torch.nn.Module()))
_MOST_VALUES = 500
"""The most values that are compared in one attribute of a module."""
_SAMPLED = 1 << 16
"""Number of a tensor's elements that are compared, evenly spaced. Its version also counts writes undone later."""
_CONTAINERS = (list, tuple, set, frozenset, deque)
_COMPARED = (torch.Tensor, np.ndarray, dict, *_CONTAINERS)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_NAME_SPACES = (argparse.Namespace, SimpleNamespace, torch.nn.Module)


class Contents:
    """The contents of containers and objects in the attributes of a module and its submodules, except PyTorch's layers.

    Attributes:
        version: The number of times that a change was found.
        changed_at: The version at which each changed object changed last, by the id of the object.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known: dict[int, tuple[object, object]] = {}
        self.version = 0
        self.changed_at: dict[int, int] = {}
        self.search()

    def search(self) -> None:
        """Find the objects that the attributes refer to now."""
        module = self._module
        self._parts = set(map(id, chain(module.modules(), module.parameters(), module.buffers())))
        found = {id(value): value for one in module.modules() for value in self._objects_of(one)}
        self._known = {key: self._known.get(key, (value, self._marks(value))) for key, value in found.items()}

    def look(self) -> None:
        """Record the objects whose contents have changed since the last call."""
        changed = {key: value for key, (value, known) in self._known.items() if self._marks(value) != known}
        if changed:
            self.version += 1
            self.changed_at |= dict.fromkeys(changed, self.version)
            self._known |= {key: (value, self._marks(value)) for key, value in changed.items()}

    def _marks(self, value: object) -> list[object]:
        return list(_marks_of(value, self._parts))

    def _objects_of(self, module: torch.nn.Module) -> Iterator[object]:
        if type(module).__module__.startswith("torch."):
            return
        for name, value in vars(module).items():
            if name not in _OF_MODULES and id(value) not in self._parts and _may_change(value):
                yield value


def _may_change(value: object) -> bool:
    """Return whether the contents of an attribute can change in place and can be compared."""
    return isinstance(value, _COMPARED) or _is_open(value)


def _marks_of(value: object, known: Collection[int]) -> Iterator[object]:
    """Yield marks that differ if the value or its contents differ.

    Args:
        value: The value of an attribute; it is not changed.
        known: The ids of modules, parameters and buffers. Their contents are not searched: `ModuleParts` and others
            watch them.
    """
    waiting, passed = [value], set[int]()
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        one = waiting.pop()
        if isinstance(one, SCALARS):
            yield one
            continue
        yield id(one)
        if id(one) in passed or id(one) in known:
            continue
        passed.add(id(one))
        if isinstance(one, torch.Tensor):
            yield from _of_tensor(one)
        elif isinstance(one, np.ndarray):
            yield digest(one)
        elif isinstance(one, (dict, *_CONTAINERS)):
            yield len(one)
            inner = chain(one.values(), one) if isinstance(one, dict) else iter(one)
            waiting += islice(inner, _MOST_VALUES)
        elif _is_open(one):
            waiting += islice(vars(one).values(), _MOST_VALUES)


def _is_open(value: object) -> bool:
    """Return whether a value is an object whose attributes the user's code defines."""
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, _NAME_SPACES) or is_users_module(sys.modules.get(type(value).__module__))


def _of_tensor(tensor: torch.Tensor) -> Iterator[object]:
    if tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel():
        flat = tensor.detach().reshape(-1)[:: -(-tensor.numel() // _SAMPLED)]
        yield digest(flat.contiguous().view(torch.uint8).numpy(), most_bytes=None)
    elif tensor.device.type != "cpu" and not tensor.is_inference():
        yield tensor._version  # reading the bits would wait for the device
