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
    """What a module and those inside of it have in containers and objects; layers of PyTorch, which nobody edits, not.

    Args:
        module: looked at now, and whenever it is asked for.

    Attributes:
        version: how often something was found to have changed.
        changed_at: for the id of each object that has changed the version then.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known: dict[int, tuple[Any, Any]] = {}
        self.version = 0
        self.changed_at: dict[int, int] = {}
        self.search()

    def search(self) -> None:
        """Look for the objects that the attributes have now."""
        found = {id(value): value for one in self._module.modules() for value in _objects_of(one)}
        self._known = {key: self._known.get(key, (value, _plain_part(value))) for key, value in found.items()}

    def look(self) -> None:
        """Look whether one of the objects has other contents than before."""
        changed = {key: value for key, (value, known) in self._known.items() if _plain_part(value) != known}
        if changed:
            self.version += 1
            self.changed_at |= dict.fromkeys(changed, self.version)
            self._known |= {key: (value, _plain_part(value)) for key, value in changed.items()}


def _objects_of(module: torch.nn.Module) -> Iterator[Any]:
    if type(module).__module__.startswith("torch."):
        return
    for name, value in vars(module).items():
        is_object = hasattr(value, "__dict__") and not isinstance(value, _OTHERS)
        if name not in _OF_MODULES and (is_object or isinstance(value, _CONTAINERS)):
            yield value


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
