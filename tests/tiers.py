"""Which values of a parameter are of the default tier; the complete one takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(values: Iterable[Any], default: int = 1) -> list[Any]:
    """All values of a parameter, of which the default tier takes the first ones only."""
    values = list(values)
    return [*values[:default], *(also(value) for value in values[default:])]


def only(few: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """All values of a parameter, of which the default tier takes only a few."""
    few = list(few)
    return [value if value in few else also(value) for value in values]


def also(*values: Any) -> Any:
    """A case of a test that only the complete tier runs: the value of its parameter, or those of several."""
    return pytest.param(*values, marks=pytest.mark.complete)
