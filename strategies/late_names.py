"""Public names of a package that are imported at their first use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from strategies.late_jax import without_collections


def places_in(init: str) -> dict[str, str]:
    """Return the places of the names that a stub imports, as type checkers read them.

    Args:
        init: The path of a package's `__init__.py`; the stub `__init__.pyi` lies beside it.
    """
    stub = Path(init).with_suffix(".pyi").read_text(encoding="utf-8")
    return {name: place for place, name in re.findall(r"^from (\S+) import (\w+) as", stub, re.MULTILINE)}


def late_names(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package (PEP 562), which import its names at their first use.

    Args:
        package: The name of the package.
        places: For each name the module that has it, or the package of which it is a module. `__dir__` lists the names
            that are in `__all__` too, because `help` and `inspect.getmembers` import all that it lists.
    """

    def get(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        with without_collections():
            value = None if place == package else getattr(import_module(place), name, None)
            if value is None:
                value = import_module(f"{place}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        found = vars(sys.modules[package])
        return sorted({*found, *found["__all__"]})

    return get, names
