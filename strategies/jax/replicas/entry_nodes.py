"""The values of the journal's entries that JAX and pytrees know: nodes, arrays of JAX, and shapes of large arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import final

import numpy as np
from typing_extensions import override

import strategies.trees as trees
from strategies.core.entries import Nodes
from strategies.late_jax import is_jax_array, jnp
from strategies.typing import Tree

_ARRAY = "jax:Array"


@final
class TreeNodes(Nodes):
    """Nodes of pytrees whose classes have names in modules, arrays of JAX, and `ShapeOfArray`."""

    @override
    def apart(self, value: Tree) -> tuple[str, Sequence[Tree]] | None:
        if is_jax_array(value):
            if value.weak_type:
                raise TypeError("a weakly typed array of JAX cannot be sent; give it a dtype")
            return _ARRAY, [np.asarray(value)]
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if kind is trees.ShapeOfArray:
            return name, [np.array(value.shape, np.int64), np.empty(0, value.dtype)]
        node = trees.node_of(value)
        if node is None or _class_of(name) is not kind:
            return None
        meta, children = node
        return name, [meta, *children]

    @override
    def together(self, name: str, parts: Sequence[Tree]) -> Tree:
        kind = None if name == _ARRAY else _class_of(name)
        if name == _ARRAY or kind is trees.ShapeOfArray:
            return _of_arrays(name, parts)
        if kind is None:
            raise ValueError(f"this program has no class {name}")
        meta, *children = parts
        return trees.node_from(kind, meta, children)


def _of_arrays(name: str, parts: Sequence[Tree]) -> Tree:
    """Return an array of JAX or the shape of an array; its parts are arrays of NumPy."""
    match parts:
        case [np.ndarray() as array] if name == _ARRAY:
            return jnp.asarray(array)
        case [np.ndarray() as lengths, np.ndarray() as empty] if name != _ARRAY and lengths.dtype == np.int64:
            return trees.ShapeOfArray(tuple(lengths.tolist()), empty.dtype)
    raise ValueError(f"no {name} can be made from these {len(parts)} parts")


def _class_of(name: str) -> type | None:
    """Return the class of a name such as `strategies.jax.evaluation.mean:Mean`; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # attributes of lazy modules would import others
    return found if isinstance(found, type) else None
