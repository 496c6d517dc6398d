"""What a function does to arrays that it is given and returns: nothing, an addition, or something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from strategies.programs.jaxpr import Atom, Graph

_SAME_VALUES = frozenset({"convert_element_type", "reshape", "copy", "broadcast_in_dim"})
_SUMS = frozenset({"add", "add_any", "scatter-add"})


def looks(function: Callable[..., Any], old: Sequence[Any], *others: Any) -> tuple[list[bool], list[bool]]:
    """For each of some arrays whether a function changes it, and whether it only adds to it.

    Args:
        function: `(arrays, *others) -> new arrays`; traceable.
        old: the arrays, or their shapes and dtypes.
        others: further arguments.
    """
    graph = Graph.of(jax.make_jaxpr(function)(list(old), *others))
    pairs = list(zip(graph.arguments[: len(old)], graph.results, strict=True))
    return [new is not before for before, new in pairs], [_adds(graph, before, new) for before, new in pairs]


def depends_on(function: Callable[..., Any], old: Sequence[Any], matters: Sequence[bool], *others: Any) -> list[bool]:
    """Return for each result whether it depends on the old arrays that matter or on any of the others.

    Args:
        function: see `looks`.
        old: see there.
        matters: for each of them.
        others: see there.
    """
    graph = Graph.of(jax.make_jaxpr(function)(list(old), *others))
    chosen = [one for one, flag in zip(graph.arguments, matters, strict=False) if flag]
    read = {id(one) for one in [*chosen, *graph.arguments[len(old) :]]}

    def depends(result: Atom) -> bool:
        behind = (graph.equations[number] for number in graph.ancestors([result]))
        return id(result) in read or any(id(atom) in read for equation in behind for atom in equation.invars)

    return [depends(result) for result in graph.results]


def _adds(graph: Graph, before: Atom, new: Atom) -> bool:
    """Whether what is made is a sum of which `before` is one part and on which no other part depends."""
    if new is before:
        return True
    equation = graph.producer(new)
    if equation is None:
        return False
    name, parts = equation.primitive.name, list(equation.invars)
    if name in _SAME_VALUES:
        return _adds(graph, before, parts[0])
    depend = [part for part in parts if _depends(graph, part, before)]
    return name in _SUMS and len(depend) == 1 and _adds(graph, before, depend[0])


def _depends(graph: Graph, atom: Atom, before: Atom) -> bool:
    behind = (graph.equations[number] for number in graph.ancestors([atom]))
    return atom is before or any(read is before for equation in behind for read in equation.invars)
