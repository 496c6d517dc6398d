"""Which of the variables are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
from jax.tree_util import keystr

from strategies.typing import Leaf, Tree, Variables

Filter: TypeAlias = Callable[[str, Any], bool] | Tree
"""A function of a variable's name, such as `['dense']['kernel']`, and of the variable; or a pytree of bools that begins
as the variables do; or None, for all of them."""


@dataclass(frozen=True)
class Trainable:
    """For each variable whether it is trained.

    Attributes:
        flags: in the order of the variables.
    """

    flags: tuple[bool, ...]

    @classmethod
    def of(cls, variables: Variables, trainable: Filter) -> Trainable:
        """What a filter says of variables, or of their shapes and dtypes.

        Raises:
            TypeError: if it says anything but True or False.
            ValueError: if it is a pytree of another structure, or no variable is trained.
        """
        named = jax.tree_util.tree_leaves_with_path(variables)
        if trainable is None:
            return cls((True,) * len(named))
        if callable(trainable):
            flags = [trainable(keystr(path), leaf) for path, leaf in named]
        else:
            try:
                below = jax.tree.map(lambda flag, tree: jax.tree.map(lambda _: flag, tree), trainable, variables)
            except ValueError as error:
                raise ValueError(
                    f"trainable is {trainable!r}, and the variables are a {jax.tree.structure(variables)}; give a "
                    "pytree of bools that begins like them, or a function (name, variable) -> bool"
                ) from error
            flags = jax.tree.leaves(below)
        for (path, _), flag in zip(named, flags, strict=True):
            if not isinstance(flag, bool):
                raise TypeError(f"trainable says {flag!r} of variable {keystr(path)}; it must say True or False")
        if named and not any(flags):
            raise ValueError("trainable leaves no variable to train; let it be True for one of them at least")
        return cls(tuple(flags))

    @cached_property
    def is_all(self) -> bool:
        """Whether all variables are trained."""
        return all(self.flags)

    def pick(self, variables: Variables) -> Variables:
        """Those that are trained: the same tree, with None for the others."""
        if self.is_all:
            return variables
        leaves, structure = jax.tree.flatten(variables)
        return jax.tree.unflatten(structure, [leaf if flag else None for leaf, flag in self._pairs(leaves)])

    def frozen(self, variables: Variables) -> Variables:
        """The others: the same tree, with None for those that are trained."""
        leaves, structure = jax.tree.flatten(variables)
        return jax.tree.unflatten(structure, [None if flag else leaf for leaf, flag in self._pairs(leaves)])

    def put(self, variables: Variables, picked: Variables) -> Variables:
        """The variables with others for those that are trained."""
        if self.is_all:
            return picked
        leaves, structure = jax.tree.flatten(variables)
        trained = iter(jax.tree.leaves(picked))
        return jax.tree.unflatten(structure, [next(trained) if flag else leaf for leaf, flag in self._pairs(leaves)])

    def _pairs(self, leaves: Sequence[Leaf]) -> list[tuple[Leaf, bool]]:
        return list(zip(leaves, self.flags, strict=True))
