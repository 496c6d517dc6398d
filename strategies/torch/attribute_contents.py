"""Lists, dictionaries and objects in the attributes of a module, whose contents a program may change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from strategies.torch.held_values import marks_of, may_change


class Contents:
    """The contents of containers and objects in the attributes of a module and its submodules, but layers of PyTorch.

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
        """Find the objects that the attributes have now."""
        module = self._module
        self._parts = set(map(id, chain(module.modules(), module.parameters(), module.buffers())))
        found = {id(value): value for one in module.modules() for value in self._objects_of(one)}
        self._known = {key: self._known.get(key, (value, self._marks(value))) for key, value in found.items()}

    def look(self) -> None:
        """Note the objects whose contents have changed since the last look."""
        changed = {key: value for key, (value, known) in self._known.items() if self._marks(value) != known}
        if changed:
            self.version += 1
            self.changed_at |= dict.fromkeys(changed, self.version)
            self._known |= {key: (value, self._marks(value)) for key, value in changed.items()}

    def _marks(self, value: Any) -> list[Any]:
        return list(marks_of(value, self._parts))

    def _objects_of(self, module: torch.nn.Module) -> Iterator[Any]:
        if type(module).__module__.startswith("torch."):
            return
        for name, value in vars(module).items():
            if name not in _OF_MODULES and id(value) not in self._parts and may_change(value):
                yield value


_OF_MODULES = frozenset(vars(torch.nn.Module()))
