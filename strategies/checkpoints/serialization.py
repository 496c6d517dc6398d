"""Arrays and plain values in the form in which checkpoints keep them."""

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
        arrays: name, dtype and shape of each.
    """

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Leaf]) -> Packing:
        """Return the packing of these arrays."""
        return cls(tuple((name, str(array.dtype), tuple(array.shape)) for name, array in arrays.items()))

    @classmethod
    def from_lists(cls, lists: list[Any]) -> Packing:
        """Return the packing of which JSON made lists; ValueError when it did not."""
        try:
            return cls(tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in lists))
        except TypeError as error:
            raise ValueError(f"{lists!r} is not a list of names, dtypes and shapes") from error

    @property
    def layouts(self) -> dict[str, str]:
        """Dtype and shape of each array, such as `float32[3, 2]`."""
        return {name: f"{dtype}{list(shape)}" for name, dtype, shape in self.arrays}

    def allocate(self) -> dict[str, np.ndarray]:
        """A flat array for each dtype, not initialised."""
        sizes: dict[str, int] = {}
        for _, dtype, shape in self.arrays:
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
        return {dtype: np.empty(size, dtype) for dtype, size in sizes.items()}

    def views(self, flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays in flat ones like those of `allocate`; nothing is copied."""
        ends: dict[str, int] = {}
        found = {}
        for name, dtype, shape in self.arrays:
            begin = ends.get(dtype, 0)
            ends[dtype] = begin + math.prod(shape)
            found[name] = flat[dtype][begin : ends[dtype]].reshape(shape)
        return found


def plain_values(extra: Any) -> dict[str, Any]:
    """A copy of the program's own values as JSON gives them back: tuples are lists then.

    Args:
        extra: a mapping of strings to numbers, strings, True, False, None, and lists and mappings of these. A number
            may be a scalar of NumPy or JAX.

    Raises:
        TypeError: if it is another one, or has something else in it.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; it is a dictionary with strings as keys")
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
    """The metrics as numbers.

    Args:
        metrics: a mapping of strings to numbers, or to scalars of NumPy or JAX, such as those that a step returns.

    Raises:
        TypeError: if it is something else.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"metrics is {metrics!r}; it is a dictionary of numbers, such as a step returns") from error


def _plain(value: Leaf) -> object:
    """For JSON: scalars of arrays as numbers, mappings as dictionaries."""
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"it is of type {type(value).__name__}")


class Age:
    """The age of some memory: how often its content has been replaced.

    Attributes:
        number: of replacements.
    """

    def __init__(self) -> None:
        self.number = 0


@final
class HostArray(np.ndarray):
    """A view of memory in which the next step writes what follows; it is used up then, as arrays of JAX are.

    Checkpoints hand such arrays on as they are, whereas arrays of JAX have no 64 bits.
    """

    _age: Age | None = None
    _born = 0

    @classmethod
    def of(cls, array: np.ndarray, age: Age) -> HostArray:
        """The array, until its memory is replaced."""
        view = array.view(cls)
        view._age, view._born = age, age.number
        return view

    def is_deleted(self) -> bool:
        """Whether a step has used it up."""
        return self._age is not None and self._age.number != self._born
