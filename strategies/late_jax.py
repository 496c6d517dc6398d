"""JAX, imported at its first use, for the modules that programs of PyTorch load too.

`import jax` takes 0.5 s of processor time and 100 MB. The modules here are objects that import the module that they
stand for when one of its attributes is read, as `lazy import` of PEP 810 will. Modules that only JAX's engine needs
import JAX themselves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax as jax
    import jax.extend.core as jax_core
    import jax.numpy as jnp
    from jax._src import distributed as distributed
    from jax._src import xla_bridge as xla_bridge
    from typing_extensions import TypeIs


@contextmanager
def without_collections() -> Iterator[None]:
    """Import without garbage collection.

    JAX, optax and PyTorch make 100,000 permanent objects each. Looking through them again and again takes a fifth of
    their imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


__all__ = [
    "distributed",
    "is_jax_array",
    "is_jax_loaded",
    "jax",
    "jax_core",
    "jnp",
    "when_jax_is_imported",
    "xla_bridge",
]


def is_jax_loaded() -> bool:
    """Return whether anybody in this process has imported JAX."""
    return "jax" in sys.modules


def is_jax_array(leaf: object) -> TypeIs[jax.Array]:
    """Return whether a leaf of a tree is an array of JAX; JAX is not imported for it."""
    return is_jax_loaded() and isinstance(leaf, jax.Array)


class _LateModule(ModuleType):
    """A module that is imported when one of its attributes is read."""

    def __init__(self, name: str, load: Callable[[], ModuleType]) -> None:
        super().__init__(name)
        self._load = load

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        module = sys.modules.get(self.__name__)
        if module is None or not hasattr(module, name):  # perhaps another thread is importing it
            with without_collections():
                module = self._load()
        value: object = getattr(module, name)
        if isinstance(value, type | ModuleType):
            setattr(self, name, value)  # the next read takes 20 ns instead of 500
        return value


if not TYPE_CHECKING:
    jax = _LateModule("jax", lambda: import_module("jax"))
    jnp = _LateModule("jax.numpy", lambda: import_module("jax.numpy"))
    jax_core = _LateModule("jax.extend.core", lambda: import_module("jax.extend.core"))
    distributed = _LateModule("jax._src.distributed", lambda: import_module("jax._src.distributed"))
    xla_bridge = _LateModule("jax._src.xla_bridge", lambda: import_module("jax._src.xla_bridge"))


# ---- what JAX must know as soon as anybody has imported it


class _Watch(MetaPathFinder):
    """A finder that makes the first import of JAX call functions at its end."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification that the other finders give for JAX, with a loader that calls the functions."""
        if fullname != "jax":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        found = next((spec for spec in others if spec is not None), None)
        if found is not None and found.loader is not None:
            loader, execute = found.loader, found.loader.exec_module

            def and_call(module: ModuleType) -> None:
                execute(module)
                self.call()

            loader.exec_module = and_call  # type: ignore[method-assign]
        return found

    def call(self) -> None:
        """Call the waiting functions, each once, in their order."""
        while self.waiting:
            self.waiting.pop(0)()


_watch = _Watch()


def when_jax_is_imported(function: Callable[[], object]) -> None:
    """Call a function without arguments at once if JAX is imported, otherwise at the end of its import by anybody."""
    if is_jax_loaded():
        function()
        return
    _watch.waiting.append(function)
    if _watch not in sys.meta_path:  # never removed, because another thread may iterate over the list
        sys.meta_path.insert(0, _watch)
