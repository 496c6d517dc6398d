"""Lists, dictionaries and objects in the attributes of a module, of which a program may change the contents."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_OTHERS = (torch.Tensor, torch.nn.Module, FunctionType, MethodType, ModuleType, type)
MOST_ELEMENTS = 256
"""Of a container; what has more is not looked at in each step."""


class Contents:
    """What one module has in containers and objects; of layers of PyTorch nothing, which nobody edits.

    Args:
        module: looked at now, and whenever `changed` is asked.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._attributes = vars(module)
        self._is_of_pytorch = type(module).__module__.startswith("torch.")
        self._known = dict(self._found())

    def changed(self) -> list[str]:
        """The names of attributes whose contents are other ones than when this was asked before."""
        attributes = self._attributes
        names = [name for name, known in self._known.items() if _plain_part(attributes.get(name)) != known]
        if names:
            self.look()
        return [name for name in names if name in attributes]

    def look(self) -> None:
        """Take what is there now for known."""
        self._known = dict(self._found())

    def _found(self) -> Iterator[tuple[str, Any]]:
        if self._is_of_pytorch:
            return
        for name, value in self._attributes.items():
            is_object = hasattr(value, "__dict__") and not isinstance(value, _OTHERS)
            if name not in _OF_MODULES and (is_object or isinstance(value, _CONTAINERS)):
                yield name, _plain_part(value)


_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _plain_part(value: Any, depth: int = 3) -> Any:
    """What can be compared of a value: numbers and words, in containers and attributes of objects."""
    if isinstance(value, _PLAIN):
        return value
    if not depth:
        return None
    if isinstance(value, dict):
        return {key: _plain_part(one, depth - 1) for key, one in value.items()} if len(value) <= MOST_ELEMENTS else None
    if isinstance(value, list | tuple | deque):
        return [_plain_part(one, depth - 1) for one in value] if len(value) <= MOST_ELEMENTS else None
    if isinstance(value, set | frozenset):
        return set(value) if len(value) <= MOST_ELEMENTS else None
    if isinstance(value, _OTHERS) or not hasattr(value, "__dict__"):
        return None
    return _plain_part(vars(value), depth - 1)
