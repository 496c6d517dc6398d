"""What is to be done when another library is imported, if it ever is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_waiting: set[str] = set()
_lock = threading.RLock()


class _Watch(MetaPathFinder):
    """Finds a library where the others find it, and does something when it is there."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        found = find_spec(fullname)
        if found is None or found.loader is None:
            sys.meta_path.insert(0, self)
            return found
        loader: Any = found.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._action()

        loader.exec_module = exec_module
        return found


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Do something once, when a library has been imported: now, or then.

    Args:
        name: of the library.
        action: may import it; the same one for each call with a name.
    """
    with _lock:  # so that it is done when this returns, whichever thread does it
        if name in _waiting:
            return
        _waiting.add(name)
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, _Watch(name, action))
