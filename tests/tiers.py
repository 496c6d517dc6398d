"""Selection of parameter values for the default tier; the complete tier takes all values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(values: Iterable[Any], default: int = 1) -> list[Any]:
    """Return all values of a parameter, all but the first ones marked for the complete tier."""
    values = list(values)
    return [*values[:default], *(also(value) for value in values[default:])]


def only(few: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return all values of a parameter, all but a few marked for the complete tier."""
    few = list(few)
    return [value if value in few else also(value) for value in values]


def also(*values: Any) -> Any:
    """Return a test case that only the complete tier runs, with one parameter or several."""
    return pytest.param(*values, marks=pytest.mark.complete)
