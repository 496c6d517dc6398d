"""Which values of a parameter are of the default tier; the complete one takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(values: Iterable[Any], default: int = 1) -> list[Any]:
    """All values of a parameter, of which the default tier takes the first ones only."""
    values = list(values)
    return [*values[:default], *(in_complete_tier(value) for value in values[default:])]


def only(few: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """All values of a parameter, of which the default tier takes only a few."""
    few = list(few)
    return [value if value in few else in_complete_tier(value) for value in values]


def in_complete_tier(*values: Any) -> Any:
    """The value of a parameter, or those of several, that the default tier leaves out."""
    return pytest.param(*values, marks=pytest.mark.complete)
