"""Frozen dataclasses as JSON between processes of poprun, whose versions may differ. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")

_MOST = 1 << 63
"""The limit of all received numbers."""


def pack(fields: Mapping[str, object], version: int) -> bytes:
    """Return the fields of a dataclass as one line of JSON with the version of its format."""
    return json.dumps({"version": version, **fields}, allow_nan=False).encode()


def unpack(kind: type[Kind], data: bytes, version: int, name: str) -> Kind:
    """Return the value that `pack` made, here or in another version of poprun with the same version of the format.

    Args:
        kind: The dataclass.
        data: The JSON.
        version: The known version of the format.
        name: The words for the value in messages, such as `snapshot of poprun`.

    Raises:
        ValueError: The data are no such value, or have another version.
    """
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):  # ValueError also for thousands of digits, RecursionError for brackets
        raise ValueError(f"these data are no {name}: {data[:20]!r}") from None
    received = found.get("version") if isinstance(found, dict) else None
    if received != version:
        raise ValueError(f"this {name} has version {received!r:.20}, but {version} is known here")
    try:
        made = value_of(kind, found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"this {name} cannot be understood: {error!r:.200}") from None
    assert isinstance(made, kind)
    return made


def value_of(kind: object, found: object) -> object:
    """Return a value from JSON as a type that may consist of dataclasses, tuples, mappings, texts and numbers.

    A dataclass is an object with the names of its fields, whose other names are ignored, or a list in their order.

    Raises:
        TypeError: The value does not have the type, or a field without default is missing.
    """
    if get_origin(kind) is UnionType:  # X | None
        return None if found is None else value_of(get_args(kind)[0], found)
    if get_origin(kind) is tuple and isinstance(found, list):  # tuple[X, ...]
        return tuple(value_of(get_args(kind)[0], each) for each in found)
    if get_origin(kind) is Mapping and isinstance(found, dict):
        return {name: value_of(get_args(kind)[1], each) for name, each in found.items()}
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(found, dict | list):
        types = get_type_hints(kind)
        named = found if isinstance(found, dict) else dict(zip(types, found, strict=True))
        return kind(**{name: value_of(types[name], each) for name, each in named.items() if name in types})
    if kind is float and type(found) is int:
        kind = int
    if type(found) is not kind or (isinstance(found, int | float) and not abs(found) < _MOST):
        raise TypeError(f"{found!r:.40} is no {getattr(kind, '__name__', kind)}")
    return found
