"""Arrays of a spare that have a shape and a dtype, and whose values only the active instances know."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

import strategies.trees as trees
from strategies.errors import SpareError
from strategies.late_jax import jnp
from strategies.typing import Leaf, Tree

ENTRY_LIMIT = 1 << 20
"""The largest array in an entry of the journal, in bytes. A spare gets placeholders for larger arrays."""


class UnreadableAttributeError(SpareError, AttributeError):
    """A request for an attribute that a placeholder does not have."""


class Placeholder(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of known shape and dtype, whose values arrive only if this spare becomes active.

    Args:
        shape: Shape of the array.
        dtype: Its dtype, as JAX or NumPy have it.
        wait: Function that waits until the values are there. If they do not come, it raises `SpareError`, or ends this
            spare at the end of the job.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Leaf, wait: Callable[[], None]) -> None:
        self.shape, self.dtype = shape, dtype
        self._wait = wait
        self._value: Leaf = None

    @property
    def value(self) -> Leaf:
        """The array of the active instances, as this instance has got it."""
        if self._value is None:
            self._wait()
        if self._value is None:
            raise SpareError(
                f"{self!r} is of an earlier moment than the one at which this spare has become active, so its values "
                "are gone; read variables and batches in strategy.on_chief, or before the next step"
            )
        return self._value

    @property
    def has_value(self) -> bool:
        """Whether the values have come."""
        return self._value is not None

    def fill(self, value: Leaf) -> None:
        """Take the array that an active instance has handed over."""
        self._value = value

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The number of bytes of the values."""
        return self.size * int(self.dtype.itemsize)

    def block_until_ready(self) -> Placeholder:
        """Wait until the values are computed, as programs do to measure time; a spare has nothing to compute."""
        if hasattr(self._value, "block_until_ready"):
            self._value.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        """Return whether the values were there and a step has used them up."""
        return hasattr(self._value, "is_deleted") and bool(self._value.is_deleted())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Placeholder({self.dtype}{list(self.shape)})"

    def __array__(self, dtype: Leaf = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype) if copy else np.asarray(self.value, dtype)

    @property
    def __jax_array__(self) -> Callable[[], Leaf]:
        value = self.value  # JAX asks whether there is such an attribute, and would hide an error of the call
        return lambda: value

    def __array_ufunc__(self, ufunc: Leaf, method: str, *inputs: Leaf, **options: Leaf) -> Leaf:
        return getattr(ufunc, method)(*map(_read, inputs), **options)

    def __getitem__(self, key: Leaf) -> Leaf:
        return self.value[key]

    def __iter__(self) -> Leaf:
        return iter(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else repr(self)

    def __reduce__(self) -> NoReturn:
        raise SpareError(f"{self!r} cannot be copied or sent: its values are with the active instances")

    def __getattr__(self, name: str) -> Leaf:
        if name.startswith("__") or self._value is None:
            raise UnreadableAttributeError(
                f"{self!r} of a spare has no {name!r} until this instance becomes active; read variables and batches "
                "in strategy.on_chief, or use the metrics"
            )
        return getattr(self._value, name)


def _read(leaf: Leaf) -> Leaf:
    return leaf.value if isinstance(leaf, Placeholder) else leaf


def placeholders_like(tree: Tree, wait: Callable[[], None]) -> Tree:
    """Return a tree of placeholders with the shapes and dtypes of the arrays of `tree`.

    Args:
        tree: Pytree of arrays, or of placeholders.
        wait: See `Placeholder`.
    """

    def placeholder(leaf: Leaf) -> Placeholder:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        return Placeholder(tuple(array.shape), array.dtype, wait)

    return trees.map(placeholder, tree)


def read(tree: Tree) -> Tree:
    """Return a tree with the values in place of placeholders, see `Placeholder.value`."""
    leaves, structure = trees.flatten(tree)
    if not any(isinstance(leaf, Placeholder) for leaf in leaves):
        return tree
    return trees.unflatten(structure, [_read(leaf) for leaf in leaves])


def zeros_for_placeholders(tree: Tree) -> Tree:
    """Replace placeholders by their values, or by zeros to receive values into."""

    def zeros(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, Placeholder):
            return leaf
        if leaf.has_value:
            return leaf.value
        return (
            np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf.dtype, np.dtype) else jnp.zeros(leaf.shape, leaf.dtype)
        )

    return trees.map(zeros, tree)


def fill(placeholders: Tree, values: Tree) -> None:
    """Fill the placeholders of a tree with the values of another tree of the same structure."""
    for leaf, value in zip(trees.leaves(placeholders), trees.leaves(values), strict=True):
        if isinstance(leaf, Placeholder):
            leaf.fill(value)


# ---- values in entries


def packed(tree: Tree) -> Callable[[], Tree]:
    """Return a function that returns copies of the host arrays of a tree; large arrays become their shapes."""

    def copied(leaf: Leaf) -> Leaf:
        is_large = getattr(leaf, "nbytes", 0) > ENTRY_LIMIT
        return trees.ShapeOfArray(tuple(leaf.shape), np.dtype(leaf.dtype)) if is_large else np.array(leaf)

    copies = trees.map(copied, tree)
    return lambda: copies


def unpacked(tree: Tree, wait: Callable[[], None]) -> Tree:
    """Return a tree that `packed` has made, with placeholders for large arrays."""

    def read(leaf: Leaf) -> Leaf:
        return Placeholder(leaf.shape, leaf.dtype, wait) if isinstance(leaf, trees.ShapeOfArray) else leaf

    return trees.map(read, tree)
