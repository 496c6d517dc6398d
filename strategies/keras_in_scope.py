"""The scope of a strategy for Keras: its models are hooked when the scope is entered, so Keras is imported before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType


class _LateImport(MetaPathFinder, Loader):
    """A finder that refuses the first import of Keras while a scope is open, in any thread.

    Models of a Keras that is not hooked would be trained by each instance alone.
    """

    def __init__(self) -> None:
        self.scopes: list[object] = []  # appended to and popped in one step each, by any thread

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a specification of Keras that cannot be loaded, while a scope is open."""
        return spec_from_loader(fullname, self) if fullname == "keras" and self.scopes else None

    def exec_module(self, module: ModuleType) -> None:
        """Refuse to load Keras."""
        raise ImportError(
            "keras is imported for the first time while strategy.scope() is open, and models are the strategy's only "
            "where the scope finds Keras when it is entered; import keras before the scope",
            name="keras",
        )


_late_import = _LateImport()


@contextmanager
def keras_in_scope(get_strategy: Callable[[], object]) -> Iterator[None]:
    """Have Keras know the strategy of each scope, if Keras was imported; refuse to import it for the first time inside.

    Args:
        get_strategy: tells the current strategy, or None.
    """
    if _late_import not in sys.meta_path:  # it stays: another thread may go through the list at any time
        sys.meta_path.insert(0, _late_import)
    _late_import.scopes.append(None)
    try:
        if sys.modules.get("keras") is not None:
            import_module("strategies.keras.hook").hook(get_strategy)  # by its name: it knows strategies, and Keras
        yield
    finally:
        _late_import.scopes.pop()
