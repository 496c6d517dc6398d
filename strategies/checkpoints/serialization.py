"""Arrays and plain values in the form that checkpoints store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from strategies.typing import Leaf


@dataclass(frozen=True)
class Packing:
    """The layout of named arrays in one flat array per dtype.

    Attributes:
        arrays: Name, dtype and shape of each array.
    """

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Leaf]) -> Packing:
        """Return the packing of these arrays."""
        return cls(tuple((name, str(array.dtype), tuple(array.shape)) for name, array in arrays.items()))

    @classmethod
    def from_lists(cls, lists: list[Any]) -> Packing:
        """Return the packing that JSON stored as lists; raise ValueError for other lists."""
        try:
            return cls(tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in lists))
        except TypeError as error:
            raise ValueError(f"{lists!r} is not a list of names, dtypes and shapes") from error

    @property
    def layouts(self) -> dict[str, str]:
        """The dtype and shape of each array, such as `float32[3, 2]`."""
        return {name: f"{dtype}{list(shape)}" for name, dtype, shape in self.arrays}

    def allocate(self) -> dict[str, np.ndarray]:
        """Return an uninitialised flat array for each dtype."""
        sizes: dict[str, int] = {}
        for _, dtype, shape in self.arrays:
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
        return {dtype: np.empty(size, dtype) for dtype, size in sizes.items()}

    def views(self, flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the named arrays as views of flat arrays like those of `allocate`."""
        ends: dict[str, int] = {}
        found = {}
        for name, dtype, shape in self.arrays:
            begin = ends.get(dtype, 0)
            ends[dtype] = begin + math.prod(shape)
            found[name] = flat[dtype][begin : ends[dtype]].reshape(shape)
        return found


def plain_values(extra: Any) -> dict[str, Any]:
    """Return a copy of the program's own values as JSON restores them: tuples become lists.

    Args:
        extra: Mapping of strings to numbers, strings, True, False, None, and lists and mappings of these. A number may
            be a scalar of NumPy or JAX.

    Raises:
        TypeError: If `extra` is not such a mapping.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; it must be a dictionary with strings as keys")
    plain = {}
    for name, value in extra.items():
        try:
            plain[name] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"extra[{name!r}] cannot be saved ({error}); use numbers, strings, lists and dictionaries, and keep "
                "arrays in the state"
            ) from error
    return plain


def plain_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as Python numbers.

    Args:
        metrics: Mapping of strings to numbers, or to scalars of NumPy or JAX, like the metrics of a step.

    Raises:
        TypeError: If `metrics` is not such a mapping.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"metrics is {metrics!r}; it must be a dictionary of numbers, like the metrics of a step"
        ) from error


def _plain(value: Leaf) -> object:
    """Return a value that JSON can write: a number for a scalar array, a dictionary for a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"it is of type {type(value).__name__}")


class Age:
    """The age of some memory: the number of times its content was replaced.

    Attributes:
        number: Number of replacements.
    """

    def __init__(self) -> None:
        self.number = 0


@final
class HostArray(np.ndarray):
    """A view of memory that the next step overwrites; then it is used up, like a donated array of JAX.

    Checkpoints pass such arrays on unchanged, because arrays of JAX would lose 64-bit numbers.
    """

    _age: Age | None = None
    _born = 0

    @classmethod
    def of(cls, array: np.ndarray, age: Age) -> HostArray:
        """Return a view of the array, valid until its memory is replaced."""
        view = array.view(cls)
        view._age, view._born = age, age.number
        return view

    def is_deleted(self) -> bool:
        """Return whether a step has used the view up."""
        return self._age is not None and self._age.number != self._born
