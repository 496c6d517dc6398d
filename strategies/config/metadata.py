"""What is known of an attribute of a configuration besides its value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from strategies.config.type_hints import Hint, enum_among, fits, text_of


class UnknownAttributeError(AttributeError, ValueError):
    """A configuration has no attribute of this name; the original's ValueError, which `hasattr` understands."""


@dataclass(frozen=True)
class AttributeMetadata:
    """What is known of an attribute, or of a category of attributes. Semantics: the original's class of that name.

    `__doc__` is its description.

    Attributes:
        name: the full name, such as `io_tiles.num_io_tiles`.
        description: what it is for.
        type: of its values, as a hint is written; None for a category.
        default: its value in a new configuration; None for a category.
        deprecated_msg: what to use instead; None where it is not deprecated.
        effect: what it changes here; None where it is only kept.
    """

    name: str
    description: str
    type: str | None = None
    default: object = None
    deprecated_msg: str | None = None
    effect: str | None = None
    _hint: Hint = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.description)

    @classmethod
    def of(
        cls, name: str, description: str, hint: Hint, default: object, deprecated_msg: str | None, effect: str | None
    ) -> AttributeMetadata:
        """That of an attribute whose values are of a type; see the attributes."""
        return cls(name, description, text_of(hint), default, deprecated_msg, effect, hint)

    @property
    def deprecated(self) -> bool:
        """Whether something else should be used."""
        return self.deprecated_msg is not None

    def check_type(self, value: object) -> bool:
        """True if the value is of one of the types of this attribute.

        Raises:
            TypeError: if it is of another one.
        """
        if not fits(value, self._hint):
            raise TypeError(f"Trying to set {self.name} to {value!r}, but it must be of type {self.type}")
        return True

    def restored(self, value: object) -> object:
        """A value of a dictionary or of JSON, in which enums are numbers.

        Raises:
            ValueError: for a number that stands for nothing.
        """
        choices = enum_among(self._hint)
        if choices is None or type(value) is not int:
            return value
        try:
            return choices(value)
        except ValueError:
            known = ", ".join(f"{one.value} ({one.name})" for one in choices)
            raise ValueError(f"{self.name} is {value}; it is one of {known}") from None


def unknown(name: str, near: Iterable[str], known: Iterable[str]) -> UnknownAttributeError:
    """The error for a name that a configuration has not.

    Args:
        name: as it was asked for.
        near: full names among which one may be meant; the first similar one is suggested.
        known: names that there are, told where none is similar.
    """
    last = {full.rpartition(".")[2]: full for full in reversed(list(near))}
    meant = difflib.get_close_matches(name.rpartition(".")[2], last)
    hint = f"Did you mean '{last[meant[0]]}'?" if meant else f"It has {', '.join(known)}."
    return UnknownAttributeError(f"'{name}' is not a valid attribute of this config. {hint}")
