"""Whole numbers that users give."""

import operator
from typing import Any


def positive(name: str, value: object) -> int:
    """`value` as an int; TypeError or ValueError, with `name` in it, unless it is an integer above zero."""
    return at_least(1, name, value)


def at_least(minimum: int, name: str, value: object) -> int:
    """`value` as an int; TypeError or ValueError, with `name` in it, unless it is at least `minimum`."""
    number = integer(value)
    if number is None:
        raise TypeError(f"{name} is {value!r}; an integer of at least {minimum} is needed")
    if number < minimum:
        raise ValueError(f"{name} is {number}; it must be at least {minimum}")
    return number


def integer(value: Any) -> int | None:
    """`value` as an int, whichever library's integer it is; None for anything else, truth values too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
