"""The check for user files that Python would import in place of this project's packages."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_OURS = Path(__file__).parents[1]


def check_packages(says_so: bool) -> None:
    """Check that Python imports this project's packages, before a missing name causes a confusing error.

    Args:
        says_so: Whether to warn about packages that only the program may need.

    Raises:
        ImportError: A user's file hides a package that `popdist` itself needs.
    """
    if text := describe_hidden("collectives"):
        raise ImportError(text)
    if says_so and (text := describe_hidden("strategies")):
        logger.warning("%s", text)


def describe_hidden(package: str) -> str:
    """Return a message if Python imports another module under this name, else ""."""
    origin = _origin_of(package)
    ours = _OURS / package / "__init__.py"
    if origin is None or not ours.exists() or Path(origin).resolve() == ours.resolve():
        return ""
    return (
        f"{origin} hides the package {package}, because its folder comes first where Python looks (sys.path); "
        "rename it, if the program needs the package"
    )


def _origin_of(package: str) -> str | None:
    """Return the file of a loaded module, or the file that Python would import."""
    if package in sys.modules:
        return getattr(sys.modules[package], "__file__", None)
    found = importlib.util.find_spec(package)
    return None if found is None else found.origin
