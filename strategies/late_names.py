"""Public names of a package that are imported at their first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from strategies.quick_imports import without_collections


def late_names(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package (PEP 562), which import its names at their first use.

    Type checkers need the same names as ordinary imports under `TYPE_CHECKING`.

    Args:
        package: The name of the package.
        places: For each name the module that has it. A name that ends its place is that module itself. `__dir__` lists
            the names that are in `__all__` too, because `help` and `inspect.getmembers` import all that it lists.
    """

    def get(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        with without_collections():
            module = import_module(place)
        value: object = module if place.rpartition(".")[2] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        found = vars(sys.modules[package])
        return sorted({*found, *found["__all__"]})

    return get, names
