"""A dictionary of bounded size, for layouts and plans that repeated calls use again."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dictionary that forgets everything when a new key would exceed its size. Lookups are those of a dict.

    It depends only on the keys, so ranks that make the same calls forget at the same call.

    Args:
        most: Maximum number of entries.
    """

    __slots__ = ("_most",)  # without an attribute dictionary, methods are found as fast as a dict's

    def __init__(self, most: int = 256) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._most and key not in self:
            self.clear()
        super().__setitem__(key, value)
