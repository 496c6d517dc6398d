"""What a program saves with a checkpoint besides arrays: values that JSON can write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def plain_values(extra: Any) -> dict[str, Any]:
    """A copy of the program's own values as JSON gives them back: tuples are lists then.

    Args:
        extra: a mapping of strings to numbers, strings, True, False, None, and lists and mappings of these. A number
            may be a scalar of NumPy or JAX.

    Raises:
        TypeError: if it is another one, or has something else in it.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; it is a dictionary with strings as keys")
    for name, value in extra.items():
        try:
            json.dumps(value, default=_plain)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"extra[{name!r}] cannot be saved ({error}); use numbers, strings, lists and dictionaries, and keep "
                "arrays in the state"
            ) from error
    plain: dict[str, Any] = json.loads(json.dumps(dict(extra), default=_plain))
    return plain


def plain_metrics(metrics: Any) -> dict[str, float]:
    """The metrics as numbers.

    Args:
        metrics: a mapping of strings to numbers, or to scalars of NumPy or JAX, such as those that a step returns.

    Raises:
        TypeError: if it is something else.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"metrics is {metrics!r}; it is a dictionary of numbers, such as a step returns") from error


def _plain(value: Any) -> Any:
    """For JSON: scalars of arrays as numbers, mappings as dictionaries."""
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"it is of type {type(value).__name__}")
