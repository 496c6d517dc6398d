"""Checks of arguments: types, whole numbers, axes of arrays, and names of options."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Axis = int | tuple[int, ...] | list[int]
"""One axis, or several; a negative axis counts from the end."""

_ELSEWHERE = dict.fromkeys(
    (
        *("accumulate_grad_batches", "accumulation", "accumulation_steps", "grad_accumulation"),
        *("gradient_accumulation", "gradient_accumulation_steps"),
    ),
    "gradient_accumulation_count",
)
"""Names that other libraries give to an option, with its name here."""


def wrong_type(name: str, value: object, way_out: str) -> TypeError:
    """Return a TypeError that says an argument's name, value and type, and the way out."""
    return TypeError(f"{name} is {value!r}, a {type(value).__name__}; {way_out}")


def check_optional(name: str, value: object, kind: type, way_out: str = "") -> None:
    """Raise a TypeError, see `wrong_type`, unless a value is None or of a class."""
    if not isinstance(value, kind | None):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise wrong_type(name, value, way_out or f"use {article} {kind.__name__}")


def positive(name: str, value: object) -> int:
    """Return `value` as an int; raise TypeError or ValueError, naming `name`, unless it is an integer above zero."""
    return at_least(1, name, value)


def at_least(minimum: int, name: str, value: object) -> int:
    """Return `value` as an int; raise TypeError or ValueError, naming `name`, unless it is at least `minimum`."""
    number = integer(value)
    if number is None:
        raise TypeError(f"{name} is {value!r}; an integer of at least {minimum} is needed")
    if number < minimum:
        raise ValueError(f"{name} is {number}; it must be at least {minimum}")
    return number


def integer(value: Any) -> int | None:
    """Return an integer of any library as an int; None for anything else, booleans included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_axes(axis: Axis, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of an array, sorted, with negative axes counted from the end.

    Args:
        axis: One axis or several.
        shape: The shape of the array.

    Raises:
        TypeError: If an axis is not an integer.
        ValueError: If the array has no such axis, or an axis is named twice.
    """
    numbers = [integer(one) for one in (axis if isinstance(axis, tuple | list) else (axis,))]
    found = sorted(one + len(shape) if one < 0 else one for one in numbers if one is not None)
    if len(found) < len(numbers):
        raise TypeError(f"axis is {axis!r}; it must be an integer, or a tuple of integers")
    if not set(found) <= set(range(len(shape))):
        raise ValueError(
            f"axis is {axis!r}, but a replica's value has the shape {list(shape)}; name an axis that it has, or give "
            "values with one more axis"
        )
    if len(set(found)) < len(found):
        raise ValueError(f"axis is {axis!r}, which names one axis of {list(shape)} twice; name each once")
    return tuple(found)


def checked_axis(axis: int, shape: Sequence[int]) -> int:
    """Return one axis, checked as `checked_axes` does."""
    if integer(axis) is None:
        raise TypeError(f"axis is {axis!r}; it must be an integer")
    return checked_axes(axis, shape)[0]


def parts_along(axis: Axis, array: np.ndarray) -> list[np.ndarray]:
    """Cut an array along some axes and return the parts in order; the parts lack these axes.

    Raises:
        TypeError: If an axis is not an integer.
        ValueError: If the array has no such axis, an axis is named twice, or its length is 0.
    """
    axes = checked_axes(axis, array.shape)
    lengths = [array.shape[one] for one in axes]
    if 0 in lengths:
        raise ValueError(
            f"axis is {axis!r}, but a replica's value of the shape {list(array.shape)} is empty along it; give each "
            "replica at least one row"
        )
    rest = [length for place, length in enumerate(array.shape) if place not in axes]
    rows = np.moveaxis(array, axes, range(len(axes))).reshape(int(np.prod(lengths)), *rest)
    return [np.asarray(row, order="C") for row in np.ascontiguousarray(rows)]


def require_known_options(taker: Callable[..., object], given: Iterable[str], options: Mapping[str, object]) -> None:
    """Refuse an unknown keyword argument, and suggest the option with the nearest name.

    Args:
        taker: The class that the user calls.
        given: The keywords of that call.
        options: The options that `taker` accepts besides its own parameters, by name.

    Raises:
        TypeError: For the first unknown keyword.
    """
    own = [name for name, kind in inspect.signature(taker).parameters.items() if kind.kind is not kind.VAR_KEYWORD]
    known = [*own, *(name for name in options if name not in own)]
    for name in given:
        if name not in known:
            meant = _ELSEWHERE.get(name, "")
            nearest = [meant] if meant in known else difflib.get_close_matches(name, known, 2)
            way_out = f"did you mean {' or '.join(nearest)}?" if nearest else f"it takes {', '.join(known)}"
            raise TypeError(f"{taker.__name__}() got an unexpected keyword argument {name!r}; {way_out}")


def check_metric_names(metrics: Iterable[str]) -> None:
    """Raise if a metric has the name of the loss.

    Raises:
        TypeError: If that is so.
    """
    if "loss" in metrics:
        raise TypeError("a metric is called 'loss', which is the name of the loss itself; use another name")
