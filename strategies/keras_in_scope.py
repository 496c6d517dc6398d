"""The way from strategies to their room for Keras, which is imported where a program has imported Keras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Protocol

from strategies.jax.programs.program import HeldState
from strategies.jax.replicas.replicas import Replicas


class KerasRoom(Protocol):
    """The functions of `strategies.keras` that a strategy calls."""

    def hook(self, is_scope_open: Callable[[], bool]) -> None:
        """Have models know the scope in which they are made."""

    def KerasState(self, objects: Sequence[object], replicas: Replicas) -> HeldState:
        """Return the variables of the objects of Keras that a program reads."""


_loaders: list[Callable[[], KerasRoom]] = []


def load_keras_room_with(load: Callable[[], KerasRoom]) -> None:
    """Register the function that imports the room; the package's `__init__`, which may import every room, has it."""
    _loaders[:] = [load]


def keras_room() -> KerasRoom:
    """Return the room for Keras; the first call imports it, and Keras."""
    [load] = _loaders
    return load()


class _LateImport(MetaPathFinder, Loader):
    """A finder that refuses the first import of Keras while a scope is open, in any thread.

    Models of a Keras that is not hooked would be trained by each instance alone.
    """

    def __init__(self) -> None:
        self.scopes: list[object] = []  # appended to and popped in one step each, by any thread
        self.get_strategy: Callable[[], object] = lambda: None  # a copy of a scope's context outlives the scope

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of an installed Keras, which cannot be loaded in a scope or in a copy of one."""
        if fullname != "keras" or not (self.scopes or self.get_strategy() is not None):
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        found = next((spec for spec in others if spec is not None), None)
        if found is not None:
            found.loader = self
        return found

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
    """Hook Keras for a scope if it is imported; refuse its first import while the scope is open.

    Args:
        get_strategy: tells the current strategy, or None.
    """
    if _late_import not in sys.meta_path:  # it stays: another thread may go through the list at any time
        sys.meta_path.insert(0, _late_import)
    _late_import.get_strategy = get_strategy
    _late_import.scopes.append(None)
    try:
        if sys.modules.get("keras") is not None:
            keras_room().hook(lambda: bool(_late_import.scopes))
        yield
    finally:
        _late_import.scopes.pop()
