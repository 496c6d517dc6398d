"""The link from strategies to `strategies.keras`, which is imported only after the program imports Keras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def keras_room() -> ModuleType:
    """Return `strategies.keras.hook`, the module that strategies call; the first call imports it, and Keras.

    The package imports it, because no room may import `strategies.keras`.
    """
    hook: ModuleType = sys.modules["strategies"].keras.hook
    return hook


class _LateImport(MetaPathFinder, Loader):
    """A finder that refuses the first import of Keras while a scope is open in any thread.

    If Keras were imported inside a scope, it would not be hooked, and each instance would train its models alone.
    """

    def __init__(self) -> None:
        self.scopes: list[object] = []  # append and pop are atomic, so any thread may call them
        self.get_strategy: Callable[[], object] = lambda: None  # a copy of a scope's context outlives the scope

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a specification that refuses to load Keras, if a scope or a copy of its context is active."""
        if fullname != "keras" or not (self.scopes or self.get_strategy() is not None):
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        found = next((spec for spec in others if spec is not None), None)
        if found is not None:
            found.loader = self
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Raise ImportError."""
        raise ImportError(
            "keras is imported for the first time inside strategy.scope(), but a scope only handles models of a Keras "
            "that was imported before; import keras before you enter the scope",
            name="keras",
        )


_late_import = _LateImport()


@contextmanager
def keras_in_scope(get_strategy: Callable[[], object]) -> Iterator[None]:
    """Connect Keras with a scope if it is imported; refuse its first import while the scope is open.

    Args:
        get_strategy: Returns the current strategy, or None.
    """
    if _late_import not in sys.meta_path:  # never removed, because another thread may iterate over the list
        sys.meta_path.insert(0, _late_import)
    _late_import.get_strategy = get_strategy
    _late_import.scopes.append(None)
    try:
        if sys.modules.get("keras") is not None:
            keras_room().hook(lambda: bool(_late_import.scopes))
        yield
    finally:
        _late_import.scopes.pop()
