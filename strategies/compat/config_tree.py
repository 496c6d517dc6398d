"""A tree of typed attributes, declared by classes with a default and a description for each attribute.

    class Tiles:
        count: int = 0

    Config(Tiles).count = 4  # Config is a subclass of Category

A program can look up names, types, defaults and descriptions. The tree converts to and from a dictionary or JSON.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import logging
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, NoReturn, TypeAlias, Union, final, get_args, get_origin, get_type_hints

Hint: TypeAlias = Any
"""A class, or a union, list, tuple or dict of hints."""

logger = logging.getLogger("strategies.config")


class UnknownAttributeError(AttributeError, ValueError):
    """A configuration has no attribute of this name: the original's ValueError, and an AttributeError for `hasattr`."""


@dataclass(frozen=True)
class AttributeMetadata:
    """The description of an attribute or of a category of attributes. Semantics: the original's class of that name.

    `__doc__` is the description.

    Attributes:
        name: Full name, such as `io_tiles.num_io_tiles`.
        description: Purpose of the attribute.
        type: Type of its values, written as a type hint; None for a category.
        default: Value in a new configuration; None for a category.
        deprecated_msg: Replacement of a deprecated attribute; None if it is not deprecated.
        effect: Effect in this project; None for an attribute that is only kept.
        hint: Type of its values; the class of a category.
    """

    name: str
    description: str
    type: str | None = None
    default: object = None
    deprecated_msg: str | None = None
    effect: str | None = None
    hint: Hint = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        vars(self).update(__doc__=self.description)

    @property
    def is_category(self) -> bool:
        """Whether this describes a category."""
        return self.default is None

    @property
    def deprecated(self) -> bool:
        """Whether another attribute replaces this one."""
        return self.deprecated_msg is not None

    def check_type(self, value: object) -> bool:
        """Return True if the value has one of the types of this attribute.

        Raises:
            TypeError: If it has another type.
        """
        if self.is_category or not fits(value, self.hint):
            raise TypeError(f"Trying to set {self.name} to {value!r}, but it must be of type {self.type}")
        return True

    def restored(self, value: object) -> object:
        """Convert a value of a dictionary or of JSON, with numbers for enum members, to a value of this attribute.

        Raises:
            ValueError: If a number stands for no enum member.
        """
        for choices in get_args(self.hint) or (self.hint,):
            if type(value) is int and isinstance(choices, type) and issubclass(choices, Enum):
                try:
                    return choices(value)
                except ValueError:
                    known = ", ".join(f"{one.value} ({one.name})" for one in choices)
                    raise ValueError(f"{self.name} is {value}; it must be one of {known}") from None
        return value


class Category(ABC):
    """A category of typed attributes and inner categories. Semantics: the original's base of `IPUConfig`.

    Each assignment checks the value.

    Args:
        declaration: Class that declares an attribute as `name: type = default`, and an inner category as `name: Class`,
            the declaration of this category. Its docstring describes attributes under "Attributes:", with their effects
            after "Effect:". Its `DEPRECATED` has messages by name.
        prefix: Prefix of the full names of attributes.
    """

    def __init__(self, declaration: type, prefix: str = "") -> None:
        vars(self).update(_declaration=declaration, _prefix=prefix)
        for name, row in self._rows.items():
            inner = _Inside(row.hint, f"{row.name}.") if row.is_category else copy.deepcopy(row.default)
            vars(self)[name] = inner

    @property
    @abstractmethod
    def _title(self) -> str:
        """The first line of the category's text."""

    def __copy__(self) -> Category:
        return copy.deepcopy(self)

    # ---- getting and setting

    @property
    def _rows(self) -> Mapping[str, AttributeMetadata]:
        return _described(vars(self)["_declaration"], vars(self)["_prefix"])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # copying asks for special methods before there are values
        self._unknown(name)

    def __setattr__(self, name: str, value: object) -> None:
        row = self._row(name)
        if row.is_category:
            raise TypeError(
                f"{row.name} is a category and cannot be assigned to; set one of its attributes: "
                f"{', '.join(vars(self)[name]._rows)}"
            )
        row.check_type(value)
        if row.deprecated:
            logger.warning("%s has been deprecated: %s", row.name, row.deprecated_msg)
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{name} cannot be deleted, because every configuration has it; set it to its default instead")

    def _row(self, name: str) -> AttributeMetadata:
        """Return the row of an attribute or category directly inside this one."""
        return self._rows[name] if name in self._rows else self._unknown(name)

    def _unknown(self, name: str) -> NoReturn:
        near = [row.name for row in self._rows.values()] + [row.name for _, _, row in self._walk()]
        raise _unknown(name, near, self._rows)

    def _walk(self) -> Iterator[tuple[Category, str, AttributeMetadata]]:
        """Yield each attribute and category, including those of inner categories: its owner, name and row."""
        for name, row in self._rows.items():
            yield self, name, row
            if row.is_category:
                yield from vars(self)[name]._walk()

    def attributes(self) -> Iterator[tuple[AttributeMetadata, Any]]:
        """Yield the metadata and the value of each attribute, including inner categories."""
        return ((row, vars(owner)[name]) for owner, name, row in self._walk() if not row.is_category)

    def get_attribute_metadata(self, attr: str) -> AttributeMetadata:
        """Return the metadata of an attribute or category.

        Args:
            attr: Name relative to here: `io_tiles.num_io_tiles` of an IPUConfig, `num_io_tiles` of its io_tiles.

        Raises:
            ValueError: If it does not exist.
        """
        owner, name = self, attr
        try:
            while "." in name and owner._row(first := name.partition(".")[0]).is_category:
                owner, name = vars(owner)[first], name.partition(".")[2]
            return owner._row(name)
        except ValueError as error:
            raise ValueError(f"Could not get attribute metadata for '{attr}': {error}") from error

    # ---- dictionaries and JSON

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes by their full names, enum members as their numbers."""
        return {
            row.name: value.value if isinstance(value, Enum) else copy.deepcopy(value)
            for row, value in self.attributes()
        }

    def from_dict(self, dct: Mapping[str, Any]) -> None:
        """Set all attributes that the dictionary has; if a value is refused, change nothing.

        An attribute that the dictionary lacks keeps its value, with a warning.

        Args:
            dct: Result of `to_dict`, also of a configuration that has this one as a category.

        Raises:
            TypeError: If a value has a wrong type.
            ValueError: If an attribute, or an enum member with that number, does not exist.
        """
        every = {row.name: (owner, name, row) for owner, name, row in self._walk() if not row.is_category}
        for full in dct:
            if full not in every and full.startswith(vars(self)["_prefix"]):
                raise _unknown(full, every, every)
        found = {full: row.restored(dct[full]) for full, (_, _, row) in every.items() if full in dct}
        for full, value in found.items():
            every[full][2].check_type(value)
        for full in every.keys() - found.keys():
            logger.warning("%s didn't have a value: the existing value will be retained", full)
        for full, value in found.items():
            owner, name, _ = every[full]
            before = vars(owner)[name]
            if before != value or type(before) is not type(value):
                setattr(owner, name, copy.deepcopy(value))

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def from_json(self, json_cfg: str) -> None:
        """Call `from_dict` with the values of a JSON object.

        Raises:
            ValueError: Also if the text is not JSON, or not an object.
        """
        found = json.loads(json_cfg)
        if not isinstance(found, dict):
            raise ValueError(f"the JSON of a configuration is {json_cfg}; it must be an object of names and values")
        self.from_dict(found)

    # ---- as text, and compared

    def __str__(self) -> str:
        return "\n".join(
            f"{row.name} = {value if isinstance(value, Enum) else repr(value)}" for row, value in self.attributes()
        )

    def __repr__(self) -> str:
        return "\n  ".join([f"{self._title}:", *str(self).splitlines()])

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if type(other) is type(self) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # a configuration is mutable


@final
class _Inside(Category):
    @property
    def _title(self) -> str:
        return str(vars(self)["_prefix"]).removesuffix(".")


@cache
def _described(declaration: type, prefix: str) -> Mapping[str, AttributeMetadata]:
    """Return the metadata of the attributes and categories directly inside a category, by name."""
    _, _, text = (inspect.getdoc(declaration) or "").partition("Attributes:\n")
    words = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE))
    rows = {}
    for name, hint in get_type_hints(declaration).items():
        full = prefix + name
        if not hasattr(declaration, name):
            rows[name] = AttributeMetadata(full, (hint.__doc__ or "").partition("\n")[0], hint=hint)
            continue
        description, _, effect = " ".join(words.get(name, "").split()).partition(" Effect: ")
        rows[name] = AttributeMetadata(
            full,
            description,
            text_of(hint),
            getattr(declaration, name),
            getattr(declaration, "DEPRECATED", {}).get(name),
            effect.removesuffix(".") or None,
            hint,
        )
    return rows


def _unknown(name: str, near: Iterable[str], known: Iterable[str]) -> UnknownAttributeError:
    """Return the error for an unknown name: it suggests the first similar name of `near`, or else lists `known`."""
    last = {full.rpartition(".")[2]: full for full in reversed(list(near))}
    meant = difflib.get_close_matches(name.rpartition(".")[2], last)
    hint = f"Did you mean '{last[meant[0]]}'?" if meant else f"It has {', '.join(known)}."
    return UnknownAttributeError(f"'{name}' is not a valid attribute of this config. {hint}")


def fits(value: Any, hint: Hint) -> bool:
    """Return whether a value has exactly a type: True is not an int, and 1 is not a float.

    Args:
        value: Any value.
        hint: Class other than Any; `A | B`; `list[A]`; `tuple[A, B]`, `tuple[A, ...]`; `dict[A, B]`.
    """
    kind: Any = get_origin(hint)
    parts = get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if type(value) is not (kind or hint):
        return False
    if kind is dict:
        return all(fits(key, parts[0]) and fits(one, parts[1]) for key, one in value.items())
    if kind is tuple and Ellipsis not in parts:
        return len(value) == len(parts) and all(map(fits, value, parts))
    return kind is None or all(fits(one, parts[0]) for one in value)


def text_of(hint: Hint) -> str:
    """Return the text of a hint, with the bare names of classes: `int | list[int]`."""
    return re.sub(r"\b(\w+\.)+", "", hint.__name__ if get_origin(hint) is None else str(hint))
