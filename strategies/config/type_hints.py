"""Whether a value is of the type that a hint says, exactly: True is no int, and 1 is no float."""

from __future__ import annotations

import types
from enum import Enum
from typing import Any, TypeAlias, Union, get_args, get_origin

Hint: TypeAlias = Any
"""A class, or a union, list, tuple or dict of hints, as Python evaluates an annotation."""


def fits(value: object, hint: Hint) -> bool:
    """Whether a value is of a type.

    Args:
        value: anything.
        hint: a class other than Any; `A | B`; `list[A]`; `tuple[A, B]`, `tuple[A, ...]`; `dict[A, B]`.
    """
    kind, parts = _origin(hint), get_args(hint)
    if kind is None:
        return type(value) is hint
    if kind is Union:
        return any(fits(value, part) for part in parts)
    return type(value) is kind and _holds(value, kind, parts)


def _holds(value: Any, kind: type, parts: tuple[Hint, ...]) -> bool:
    """Whether what a list, tuple or dictionary has in it is of the types that the hint says."""
    if kind is dict:
        return all(fits(key, parts[0]) and fits(one, parts[1]) for key, one in value.items())
    if kind is tuple and Ellipsis not in parts:
        return len(value) == len(parts) and all(map(fits, value, parts))
    return all(fits(one, parts[0]) for one in value)


def text_of(hint: Hint) -> str:
    """The hint as it is written: `int | list[int]`; enums by their names."""
    kind, parts = _origin(hint), get_args(hint)
    if kind is None:
        return "..." if hint is Ellipsis else str(hint.__name__)
    if kind is Union:
        return " | ".join(map(text_of, parts))
    return f"{kind.__name__}[{', '.join(map(text_of, parts))}]"


def enum_among(hint: Hint) -> type[Enum] | None:
    """The enum that a hint allows; None if it allows none."""
    classes = get_args(hint) or (hint,)
    return next((one for one in classes if isinstance(one, type) and issubclass(one, Enum)), None)


def _origin(hint: Hint) -> Any:
    """Of a hint with brackets what stands before them, Union of a union, None of a class."""
    kind: Any = get_origin(hint)
    return Union if kind is types.UnionType else kind
