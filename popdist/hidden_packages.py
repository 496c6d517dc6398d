"""Files of the user that Python imports instead of the packages that belong to this one."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_OURS = Path(__file__).parents[1]


def check_packages(says_so: bool) -> None:
    """Look whether Python imports what belongs to this package, before something is missing there.

    Args:
        says_so: whether to warn of what only the program may need.

    Raises:
        ImportError: something else stands in the place of what `popdist` itself needs.
    """
    if text := describe_hidden("collectives"):
        raise ImportError(text)
    if says_so and (text := describe_hidden("strategies")):
        logger.warning("%s", text)


def describe_hidden(package: str) -> str:
    """Return what is wrong where Python imports something else under this name; empty where it does not."""
    origin = _origin_of(package)
    ours = _OURS / package / "__init__.py"
    if origin is None or not ours.exists() or Path(origin).resolve() == ours.resolve():
        return ""
    return (
        f"{origin} hides the package {package}, because its folder comes first where Python looks (sys.path); "
        "rename it, if the program needs the package"
    )


def _origin_of(package: str) -> str | None:
    """Return the file of a module that is there already, or that would be imported."""
    if package in sys.modules:
        return getattr(sys.modules[package], "__file__", None)
    found = importlib.util.find_spec(package)
    return None if found is None else found.origin
