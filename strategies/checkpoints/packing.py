"""Named arrays, one after another, in one flat array per dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Where each array lies: behind those of its dtype that are named before it.

    Attributes:
        arrays: name, dtype and shape of each.
    """

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Packing:
        """That of these arrays."""
        return cls(tuple((name, str(array.dtype), tuple(array.shape)) for name, array in arrays.items()))

    @classmethod
    def from_lists(cls, lists: list[Any]) -> Packing:
        """That of which JSON made lists; ValueError when it did not."""
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
