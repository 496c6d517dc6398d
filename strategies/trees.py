"""Pytrees, by JAX's functions if JAX is imported, and otherwise by functions that give the same results.

Without JAX no class is a node but those of Python that JAX knows, and those given to `register_dataclass`.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias, TypeVar

import numpy as np

from strategies.late_jax import jax, when_jax_is_imported
from strategies.typing import Leaf, Tree

T = TypeVar("T", bound=type)
Path = tuple[object, ...]
"""The keys that lead to a leaf; `keystr` makes one text of them."""

_registered: dict[type, tuple[Sequence[str], Sequence[str]]] = {}
_of_jax: ModuleType | None = None
"""`jax.tree_util`, from the end of JAX's import on, when it knows our classes."""


def register_dataclass(kind: T, data_fields: Sequence[str], meta_fields: Sequence[str]) -> T:
    """Make the objects of a class nodes of pytrees, with JAX and without it.

    Args:
        kind: The class, whose constructor takes all these fields by name.
        data_fields: The fields that are children.
        meta_fields: The fields that belong to the structure.
    """
    _registered[kind] = data_fields, meta_fields
    when_jax_is_imported(lambda: jax.tree_util.register_dataclass(kind, list(data_fields), list(meta_fields)))
    return kind


@dataclass(frozen=True)
class Structure:
    """The structure of a pytree. JAX's and ours never compare equal, so compare structures made by the same library.

    Attributes:
        kind: The class of the node; None for a leaf.
        meta: The keys of a dictionary, or the fields of a class that are no children.
        children: The structures of the children.
    """

    kind: type | None
    meta: tuple[Hashable, ...] = ()
    children: tuple[Structure, ...] = ()

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return 1 if self.kind is None else sum(child.num_leaves for child in self.children)

    def __str__(self) -> str:
        return f"PyTreeDef({self._text()})"

    __repr__ = __str__

    def _text(self) -> str:
        parts = [child._text() for child in self.children]
        if self.kind is None:
            return "*"
        if self.kind is type(None):
            return "None"
        if self.kind is tuple:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if self.kind is list:
            return f"[{', '.join(parts)}]"
        if self.kind is dict:
            return "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(self.meta, parts, strict=True)) + "}"
        return f"CustomNode({self.kind.__name__}[{self.meta}], [{', '.join(parts)}])"

    def keys(self) -> list[str]:
        """Return the texts of the keys that lead to the children."""
        if self.kind in (tuple, list):
            return [f"[{number}]" for number in range(len(self.children))]
        if self.kind in _DICTIONARIES:
            return [f"[{key!r}]" for key in self.meta[len(self.meta) - len(self.children) :]]
        names = _registered[self.kind][0] if self.kind in _registered else getattr(self.kind, "_fields", ())
        return [f".{name}" for name in names]


AnyStructure: TypeAlias = "Structure | jax.tree_util.PyTreeDef"

_LEAF = Structure(None)
_DICTIONARIES = (dict, OrderedDict, defaultdict)


def _children(tree: Tree) -> tuple[tuple[Hashable, ...], Sequence[Tree]] | None:
    """Return the meta data and the children of a node; None for a leaf."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return (), tree
    if kind in _DICTIONARIES:
        keys = tuple(tree) if kind is OrderedDict else _ordered(tree)
        factory = (tree.default_factory,) if kind is defaultdict else ()
        return (*factory, *keys), [tree[key] for key in keys]
    if tree is None:
        return (), ()
    if kind in _registered:
        data, meta = _registered[kind]
        return tuple(getattr(tree, name) for name in meta), [getattr(tree, name) for name in data]
    return ((), tree) if isinstance(tree, tuple) and hasattr(kind, "_fields") else None


def _ordered(tree: Mapping[Hashable, Tree]) -> tuple[Hashable, ...]:
    try:
        return tuple(sorted(tree))  # type: ignore[type-var]  # the error below is about this
    except TypeError as error:
        raise ValueError("Comparator raised exception while sorting pytree dictionary keys.") from error


def _flattened(tree: Tree, into: list[Leaf]) -> Structure:
    found = _children(tree)
    if found is None:
        into.append(tree)
        return _LEAF
    meta, children = found
    return Structure(type(tree), meta, tuple([_flattened(child, into) for child in children]))


def _filled(structure: Structure, leaves: Sequence[Leaf]) -> Tree:
    remaining = iter(leaves)
    tree = _made(structure, remaining)
    if next(remaining, _LEAF) is not _LEAF:
        raise ValueError(f"Too many leaves for PyTreeDef; expected {structure.num_leaves}.")
    return tree


def _made(structure: Structure, leaves: Iterator[Leaf]) -> Tree:
    kind, meta = structure.kind, structure.meta
    if kind is None:
        try:
            return next(leaves)
        except StopIteration:
            raise ValueError("Too few leaves for PyTreeDef.") from None
    children = [_made(child, leaves) for child in structure.children]
    if kind is list:
        return children
    if kind is tuple:
        return tuple(children)
    if kind is dict or kind is OrderedDict:
        return kind(zip(meta, children, strict=True))
    if kind is defaultdict:
        return defaultdict(meta[0], zip(meta[1:], children, strict=True))  # type: ignore[call-overload]
    if kind in _registered:
        data_fields, meta_fields = _registered[kind]
        return kind(**dict(zip(data_fields, children, strict=True)), **dict(zip(meta_fields, meta, strict=True)))
    return None if kind is type(None) else kind(*children)


def _up_to(structure: Structure, tree: Tree, into: list[Tree]) -> None:
    """Append the parts of a tree at the places of the structure's leaves."""
    if structure.kind is None:
        into.append(tree)
        return
    found = _children(tree)
    if type(tree) is not structure.kind or found is None:
        raise ValueError(f"Expected {structure._text()}, got {tree!r}.")
    meta, children = found
    if meta != structure.meta or len(children) != len(structure.children):
        raise ValueError(f"pytree structures differ: expected {structure._text()}, got {tree!r}.")
    for child, part in zip(structure.children, children, strict=True):
        _up_to(child, part, into)


def _paths(structure: Structure, before: Path = ()) -> Iterator[Path]:
    if structure.kind is None:
        yield before
        return
    for key, child in zip(structure.keys(), structure.children, strict=True):
        yield from _paths(child, (*before, key))


# ---- the functions of `jax.tree` and `jax.tree_util`


def flatten(tree: Tree) -> tuple[list[Leaf], AnyStructure]:
    """Return the leaves of a tree, and its structure."""
    leaves: list[Leaf] = []
    return leaves, _flattened(tree, leaves)


def leaves(tree: Tree) -> list[Leaf]:
    """Return the leaves of a tree."""
    return flatten(tree)[0]


def structure(tree: Tree) -> AnyStructure:
    """Return the structure of a tree."""
    return flatten(tree)[1]


def unflatten(structure: AnyStructure, leaves: Sequence[Leaf]) -> Tree:
    """Return the tree of a structure and its leaves."""
    if isinstance(structure, Structure):
        return _filled(structure, leaves)
    return jax.tree_util.tree_unflatten(structure, leaves)


def map(function: Callable[..., Leaf], tree: Tree, *others: Tree) -> Tree:
    """Return the tree of the function's results for its leaves, and for the parts of others at the same places.

    Raises:
        ValueError: If the structure of the tree is no prefix of another one's.
    """
    leaves: list[Leaf] = []
    structure = _flattened(tree, leaves)
    parts: list[list[Tree]] = [[] for _ in others]
    for other, into in zip(others, parts, strict=True):
        _up_to(structure, other, into)
    return _filled(structure, [function(*each) for each in zip(leaves, *parts, strict=True)])


def flatten_with_path(tree: Tree) -> tuple[list[tuple[Path, Leaf]], AnyStructure]:
    """Return the leaves of a tree with their paths, and its structure."""
    leaves: list[Leaf] = []
    structure = _flattened(tree, leaves)
    return list(zip(_paths(structure), leaves, strict=True)), structure


def leaves_with_path(tree: Tree) -> list[tuple[Path, Leaf]]:
    """Return the leaves of a tree with their paths."""
    return flatten_with_path(tree)[0]


def map_with_path(function: Callable[[Path, Leaf], Leaf], tree: Tree) -> Tree:
    """Return the tree of the function's results for the paths and leaves."""
    found, structure = flatten_with_path(tree)
    return unflatten(structure, [function(path, leaf) for path, leaf in found])


def keystr(path: Path) -> str:
    """Return a path as text, such as `['dense'][0]`."""
    return "".join([str(key) for key in path])


def is_leaf(tree: Tree) -> bool:
    """Return whether a value is a leaf, and not a node."""
    return _children(tree) is None if _of_jax is None else bool(_of_jax.all_leaves([tree]))


def _take_those_of_jax() -> None:
    """Put the functions of JAX itself in the place of ours."""
    of_jax = jax.tree_util
    globals().update(
        _of_jax=of_jax,
        flatten=of_jax.tree_flatten,
        flatten_with_path=of_jax.tree_flatten_with_path,
        leaves=of_jax.tree_leaves,
        map=of_jax.tree_map,
    )


when_jax_is_imported(_take_those_of_jax)


def node_of(tree: Tree) -> tuple[Tree, Sequence[Tree]] | None:
    """Return the meta data of a node's class, and its children; None for a leaf. `node_from` takes them."""
    if isinstance(tree, tuple):
        return ((), tree) if hasattr(tree, "_fields") else None
    if _of_jax is not None:
        children, structure = _of_jax.tree_flatten(tree, is_leaf=lambda part: part is not tree)
        data = structure.node_data()
        return None if data is None else (data[1], children)
    return _children(tree)


def node_from(kind: type, meta: Tree, children: Sequence[Tree]) -> Tree:
    """Return the node with the meta data and children of `node_of`. No class is called but those of nodes.

    Raises:
        ValueError: The class is not one of nodes, or the meta data or the children do not fit.
    """
    try:
        node = _node_from(kind, meta, children)
        found = node_of(node)
    except Exception as error:
        raise ValueError(f"no {kind.__name__} can be made from {len(children)} parts: {error}") from error
    if found is None or found[0] != meta or len(found[1]) != len(children):
        raise ValueError(f"no {kind.__name__} has these parts")
    return node


def _node_from(kind: type, meta: Tree, children: Sequence[Tree]) -> Tree:
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*children)
    if kind in _registered or kind is OrderedDict:
        return _filled(Structure(kind, meta, (_LEAF,) * len(children)), children)
    if _of_jax is not None:
        # `PyTreeDef.from_node_data_and_children` of JAX 0.10 ends the process by SIGSEGV if the meta data do not fit.
        registered = sys.modules["jax._src.tree_util"]._registry.get(kind)
        if registered is not None:
            return registered.from_iter(meta, children)
    raise ValueError("it is no class of nodes")


def rows_of(batch: Tree) -> int:
    """Return the number of rows of a batch: the length of its longest array."""
    return max([shape[0] for leaf in leaves(batch) if (shape := getattr(leaf, "shape", ()))], default=0)


@dataclass(frozen=True)
class ShapeOfArray:
    """The shape and dtype of an array, as `jax.ShapeDtypeStruct` without JAX."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)
