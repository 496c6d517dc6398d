"""A tree of typed attributes: what its names, types and defaults are is said once, in classes.

    class Tiles(Category):
        count: int = attribute(0, "How many there are.")

    class Config(Category):
        tiles: Tiles = category(Tiles, "All about tiles.")

    Config().tiles.count = 4

Names, types, defaults and descriptions can be asked for, and the tree written and read as a dictionary or JSON.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast, get_type_hints

from strategies.config.metadata import AttributeMetadata, unknown

T = TypeVar("T")
C = TypeVar("C", bound="Category")

logger = logging.getLogger("strategies.config")


@dataclass(frozen=True)
class _Declared:
    """An attribute or category, as its class declares it."""

    default: Any  # the class of a category
    description: str
    deprecated_msg: str | None
    effect: str | None


def attribute(default: T, description: str, *, effect: str | None = None, deprecated: str | None = None) -> T:
    """Declare an attribute; the annotation is the type of its values.

    Args:
        default: its value in a new configuration.
        description: what it is for.
        effect: what it changes; None where it is only kept.
        deprecated: what to use instead.
    """
    return cast(T, _Declared(default, description, deprecated, effect))


def category(of: type[C], description: str, *, deprecated: str | None = None) -> C:
    """Declare a category of attributes; where it is deprecated all that is in it is, too. See `attribute`."""
    return cast(C, _Declared(of, description, deprecated, None))


class Category:
    """Typed attributes and categories of them. Semantics: the original's base of `IPUConfig`.

    Values are checked when they are set. There are no other attributes than those that the class declares.
    """

    def __init__(self, _prefix: str = "", _deprecated: str | None = None) -> None:
        if type(self) is Category:
            raise TypeError("Category declares no attributes; make a class from it that does")
        hints = get_type_hints(type(self))
        inside = self.__dict__
        inside["_metadata"] = {}
        for name, declared in _declared_by(type(self)).items():
            full, deprecated = _prefix + name, declared.deprecated_msg or _deprecated
            if isinstance(declared.default, type) and issubclass(declared.default, Category):
                self._metadata[name] = AttributeMetadata(full, declared.description, deprecated_msg=deprecated)
                inside[name] = declared.default(f"{full}.", deprecated)
            else:
                said = (declared.description, hints[name], declared.default, deprecated, declared.effect)
                self._metadata[name] = AttributeMetadata.of(full, *said)
                inside[name] = copy.deepcopy(declared.default)

    _metadata: dict[str, AttributeMetadata]

    # ---- getting and setting

    def __getattr__(self, name: str) -> Any:
        """Called for names that there are not."""
        if "_metadata" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        raise self._unknown(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._metadata:
            raise self._unknown(name)
        self._check(name, value)
        metadata = self._metadata[name]
        if metadata.deprecated:
            logger.warning("%s has been deprecated: %s", metadata.name, metadata.deprecated_msg)
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{name} cannot be deleted; every configuration has it: set it to its default")

    def _check(self, name: str, value: object) -> None:
        metadata = self._metadata[name]
        if isinstance(self.__dict__[name], Category):
            raise TypeError(
                f"{metadata.name} is a category and cannot be assigned to; set one of its attributes: "
                f"{', '.join(self.__dict__[name]._metadata)}"
            )
        metadata.check_type(value)

    def _unknown(self, name: str) -> ValueError:
        own = [metadata.name for metadata in self._metadata.values()]
        inside = [metadata.name for metadata, _ in self._every() if metadata.name not in own]
        return unknown(name, [*own, *inside], self._metadata)

    def _every(self) -> Iterator[tuple[AttributeMetadata, Any]]:
        """All attributes and categories of this one and of those in it, with their values."""
        for name, metadata in self._metadata.items():
            value = self.__dict__[name]
            yield metadata, value
            if isinstance(value, Category):
                yield from value._every()

    def attributes(self) -> Iterator[tuple[AttributeMetadata, Any]]:
        """What is known of each attribute here and in the categories inside, and its value."""
        return ((metadata, value) for metadata, value in self._every() if not isinstance(value, Category))

    def _owner_of(self, name: str) -> tuple[Category, str]:
        """The category that has an attribute, whose name counts from here, and its name there."""
        first, _, rest = name.partition(".")
        inner = getattr(self, first)
        if not rest:
            return self, first
        if not isinstance(inner, Category):
            raise unknown(name, (), self._metadata)
        return inner._owner_of(rest)

    # ---- what is known of attributes

    def get_attribute_metadata(self, attr: str) -> AttributeMetadata:
        """What is known of an attribute or category.

        Args:
            attr: its name, counted from here: `io_tiles.num_io_tiles` of an IPUConfig, `num_io_tiles` of its io_tiles.

        Raises:
            ValueError: if there is none.
        """
        try:
            owner, name = self._owner_of(attr)
            return owner._metadata[name]
        except (ValueError, KeyError) as error:
            raise ValueError(f"Could not get attribute metadata for '{attr}': {error}") from error

    # ---- dictionaries and JSON

    def to_dict(self) -> dict[str, Any]:
        """All attributes by their full names; enums as their numbers."""
        return {
            metadata.name: value.value if isinstance(value, Enum) else copy.deepcopy(value)
            for metadata, value in self.attributes()
        }

    def from_dict(self, dct: Mapping[str, Any]) -> None:
        """Set all attributes that the dictionary has; where it is refused, none is set.

        What is missing keeps its value, with a warning.

        Args:
            dct: what `to_dict` returned, also of a configuration that has this one as a category.

        Raises:
            TypeError: if a value is of a wrong type.
            ValueError: if there is no such attribute, or no member of an enum with that number.
        """
        every = {metadata.name: metadata for metadata, _ in self.attributes()}
        for name in dct:
            if name not in every and name.startswith(self._prefix):
                raise unknown(name, every, every)
        found = {name: metadata.restored(dct[name]) for name, metadata in every.items() if name in dct}
        for name, value in found.items():
            every[name].check_type(value)
        for name in every.keys() - found.keys():
            logger.warning("%s didn't have a value: the existing value will be retained", name)
        for name, value in found.items():
            owner, last = self._owner_of(name.removeprefix(self._prefix))
            if owner.__dict__[last] != value or type(owner.__dict__[last]) is not type(value):
                setattr(owner, last, copy.deepcopy(value))

    @property
    def _prefix(self) -> str:
        first = next(iter(self._metadata.values())).name
        return first[: first.rindex(".") + 1] if "." in first else ""

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def from_json(self, json_cfg: str) -> None:
        """`from_dict` of JSON.

        Raises:
            ValueError: also if it is none, or no object.
        """
        found = json.loads(json_cfg)
        if not isinstance(found, dict):
            raise ValueError(f"the JSON of a configuration is {json_cfg}; it is an object of names and values")
        self.from_dict(found)

    # ---- as text, and compared

    def __str__(self) -> str:
        lines = (
            f"{metadata.name} = {value if isinstance(value, Enum) else repr(value)}"
            for metadata, value in self.attributes()
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return "\n  ".join([f"{type(self).__name__}:", *str(self).splitlines()])

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if type(other) is type(self) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes


def _declared_by(of: type) -> dict[str, _Declared]:
    return {name: value for name, value in vars(of).items() if isinstance(value, _Declared)}
