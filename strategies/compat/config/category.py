"""A tree of typed attributes, declared by a table of names, types, defaults and descriptions.

    TABLE = table_of({}, tiles=category("All about tiles.", count=attribute(0, "The number of tiles.")))

    Config(TABLE).tiles.count = 4  # Config is a subclass of Category

A program can look up names, types, defaults and descriptions. The tree converts to and from a dictionary or JSON.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias, Union, final, get_args, get_origin

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
        name: Full name, such as `io_tiles.num_io_tiles`; `table_of` sets it.
        description: Purpose of the attribute.
        type: Type of its values, written as a type hint; None for a category.
        default: Value in a new configuration; None for a category.
        deprecated_msg: Replacement of a deprecated attribute; None if it is not deprecated.
        effect: Effect in this project; None for an attribute that is only kept. `table_of` sets it.
        hint: Type of its values; None for a category.
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
        if not fits(value, self.hint):
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


Table: TypeAlias = Mapping[str, AttributeMetadata]


Declared: TypeAlias = "AttributeMetadata | tuple[str, Mapping[str, Declared]]"


def attribute(
    default: object, description: str, hint: Hint = None, deprecated_msg: str | None = None
) -> AttributeMetadata:
    """Return an attribute for a table. Without a hint, its values have the type of the default."""
    hint = hint or type(default)
    return AttributeMetadata("", description, text_of(hint), default, deprecated_msg, hint=hint)


def category(description: str, **inside: Declared) -> Declared:
    """Return a category for a table, with its attributes and inner categories by name."""
    return description, inside


def table_of(effects: Mapping[str, str], _prefix: str = "", /, **rows: Declared) -> Table:
    """Return attributes and categories by their full names, each category before its attributes.

    Args:
        effects: Effects of attributes, by their full names.
        rows: Attributes and categories.
    """
    table: dict[str, AttributeMetadata] = {}
    for name, row in rows.items():
        full = _prefix + name
        if isinstance(row, AttributeMetadata):
            table[full] = replace(row, name=full, effect=effects.get(full))
        else:
            description, inside = row
            table[full] = AttributeMetadata(full, description)
            table |= table_of(effects, f"{full}.", **inside)
    return table


class Category(ABC):
    """A category of typed attributes and inner categories. Semantics: the original's base of `IPUConfig`.

    Each assignment checks the value. Only attributes of the table exist.

    Args:
        table: Attributes by their full names.
    """

    _table: Table
    _values: dict[str, Any]
    _prefix: str
    _inner: dict[str, _Inside]  # by prefix, of the whole tree; each is made on first access

    def __init__(self, table: Table) -> None:
        values = {name: copy.deepcopy(row.default) for name, row in table.items() if not row.is_category}
        vars(self).update(_table=table, _values=values, _prefix="", _inner={})

    @property
    @abstractmethod
    def _title(self) -> str:
        """The first line of the category's text."""

    def __deepcopy__(self, memory: object) -> Category:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self), _values=copy.deepcopy(self._values), _inner={})
        return copied

    def __copy__(self) -> Category:
        return copy.deepcopy(self)

    # ---- getting and setting

    def __getattr__(self, name: str) -> Any:
        """Return a value, or an inner category that shares its values with this one."""
        if "_table" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        row = self._row(name)
        if not row.is_category:
            return self._values[row.name]
        prefix = f"{row.name}."
        if prefix not in self._inner:
            inner = self._inner[prefix] = _Inside.__new__(_Inside)
            vars(inner).update(vars(self), _prefix=prefix)
        return self._inner[prefix]

    def __setattr__(self, name: str, value: object) -> None:
        row = self._row(name)
        if row.is_category:
            inside = [each.removeprefix(f"{row.name}.") for each in self._table if each.startswith(f"{row.name}.")]
            raise TypeError(
                f"{row.name} is a category and cannot be assigned to; set one of its attributes: "
                f"{', '.join(each for each in inside if '.' not in each)}"
            )
        row.check_type(value)
        self._keep(row, value)

    def _keep(self, row: AttributeMetadata, value: object) -> None:
        if row.deprecated:
            logger.warning("%s has been deprecated: %s", row.name, row.deprecated_msg)
        self._values[row.name] = value

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{name} cannot be deleted, because every configuration has it; set it to its default instead")

    def __dir__(self) -> list[str]:
        inside = (each.removeprefix(self._prefix) for each in self._table if each.startswith(self._prefix))
        return [*super().__dir__(), *(each for each in inside if "." not in each)]

    def _row(self, name: str) -> AttributeMetadata:
        """Return the row of an attribute or category directly inside this one."""
        row = self._table.get(self._prefix + name)
        if row and "." not in name:
            return row
        inside = [each for each in self._table if each.startswith(self._prefix)]
        own = [each for each in inside if "." not in each.removeprefix(self._prefix)]
        raise _unknown(name, [*own, *inside], [each.removeprefix(self._prefix) for each in own])

    def attributes(self) -> Iterator[tuple[AttributeMetadata, Any]]:
        """Yield the metadata and the value of each attribute, including inner categories."""
        return ((self._table[name], value) for name, value in self._values.items() if name.startswith(self._prefix))

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
                owner, name = getattr(owner, first), name.partition(".")[2]
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
        every = {row.name: row for row, _ in self.attributes()}
        for name in dct:
            if name not in every and name.startswith(self._prefix):
                raise _unknown(name, every, every)
        found = {name: row.restored(dct[name]) for name, row in every.items() if name in dct}
        for name, value in found.items():
            every[name].check_type(value)
        for name in every.keys() - found.keys():
            logger.warning("%s didn't have a value: the existing value will be retained", name)
        for name, value in found.items():
            if self._values[name] != value or type(self._values[name]) is not type(value):
                self._keep(every[name], copy.deepcopy(value))

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
        return self._prefix.removesuffix(".")


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
