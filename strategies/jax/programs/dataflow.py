"""The dataflow of traced functions: which arrays they change, and whether they combine elements of an array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.extend import core

from strategies.jax.programs.jaxpr import Atom, Equation, Graph, body_of_call, every_equation
from strategies.typing import Function, Leaf

_SAME_VALUES = frozenset({"convert_element_type", "reshape", "copy", "broadcast_in_dim"})
_SUMS = frozenset({"add", "add_any", "scatter-add"})

_ACROSS = frozenset(
    {
        "argmax", "argmin", "cholesky", "concatenate", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin",
        "cumprod", "cumsum", "dot_general", "eig", "eigh", "fft", "gather", "householder_product", "lu", "qr",
        "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor",
        "reduce_window_max", "reduce_window_sum", "rev", "scatter", "scatter-add", "sort", "svd", "top_k",
        "transpose", "triangular_solve", "dynamic_slice", "dynamic_update_slice",
    }
)  # fmt: skip

_LOOPS_AND_BRANCHES = frozenset({"cond", "scan", "while"})
_BY_PLACE = frozenset({"random_bits", "random_seed", "random_wrap", "random_fold_in", "random_split", "threefry2x32"})
"""The operations whose elements depend on their places in the array."""

# ---- between whole arrays


def looks(function: Function, old: Sequence[Leaf], *others: Leaf) -> tuple[list[bool], list[bool]]:
    """Return, for each array, whether a function changes it, and whether the function only adds to it.

    Args:
        function: Traceable function `(arrays, *others) -> new arrays`.
        old: Arrays, or their shapes and dtypes.
        others: Further arguments.
    """
    graph = Graph.of(jax.make_jaxpr(function)(list(old), *others))
    pairs = list(zip(graph.arguments[: len(old)], graph.results, strict=True))
    return [new is not before for before, new in pairs], [_adds(graph, before, new) for before, new in pairs]


def depends_on(function: Function, old: Sequence[Leaf], matters: Sequence[bool], *others: Leaf) -> list[bool]:
    """Return, for each result, whether it depends on the old arrays that matter, or on any other argument.

    Args:
        function: Traceable function `(arrays, *others) -> new arrays`.
        old: Arrays, or their shapes and dtypes.
        matters: Whether each of these arrays matters.
        others: Further arguments.
    """
    graph = Graph.of(jax.make_jaxpr(function)(list(old), *others))
    chosen = [one for one, flag in zip(graph.arguments, matters, strict=False) if flag]
    return [_depends(graph, result, [*chosen, *graph.arguments[len(old) :]]) for result in graph.results]


def _adds(graph: Graph, before: Atom, new: Atom) -> bool:
    """Return whether the new value is a sum that has `before` as one term, and no other term depends on `before`."""
    if new is before:
        return True
    equation = graph.producer(new)
    if equation is None:
        return False
    name, parts = equation.primitive.name, list(equation.invars)
    if name in _SAME_VALUES:
        return _adds(graph, before, parts[0])
    depend = [part for part in parts if _depends(graph, part, [before])]
    return name in _SUMS and len(depend) == 1 and _adds(graph, before, depend[0])


def _depends(graph: Graph, atom: Atom, others: Sequence[Atom]) -> bool:
    """Return whether a value is one of `others`, or computed from one of them."""
    read = {id(one) for one in others}
    behind = (graph.equations[number] for number in graph.ancestors([atom]))
    return id(atom) in read or any(id(one) in read for equation in behind for one in equation.invars)


# ---- between the elements of an array


def first_across_elements(closed: core.ClosedJaxpr) -> str | None:
    """Return the first operation of a traced function that combines or moves elements of an array, and its operand.

    Returns:
        Text such as "reduce_sum of float32[784,1024]"; None if there is no such operation.
    """
    for equation in every_equation(closed.jaxpr):
        name = equation.primitive.name
        operands = [atom.aval for atom in equation.invars if getattr(atom.aval, "size", 0) > 1]
        sizes = {getattr(out.aval, "size", 0) for out in equation.outvars}
        made = max(sizes, default=0)
        if name in _BY_PLACE or name.startswith("rng_") or (name == "iota" and made > 1):
            return f"{name}, which depends on the places of elements"
        if operands and (name in _ACROSS or name.startswith("reduce_") and name != "reduce_precision"):
            return f"{name} of {operands[0].str_short()}"
        if any({operand.size} != sizes for operand in operands) and not _is_looked_into(equation):  # such as slices
            return f"{name} of {operands[0].str_short()}"
    return None


def operations(closed: core.ClosedJaxpr) -> list[tuple[str, ...]]:
    """Return the operations of a traced function in order, each with its literals, after the function's constants."""
    own = tuple(str(value) for value in closed.consts if np.size(value) == 1)
    return [own, *((equation.primitive.name, *_numbers(equation)) for equation in every_equation(closed.jaxpr))]


def _is_looked_into(equation: Equation) -> bool:
    """Return whether the programs in an equation show everything that it does with elements."""
    return equation.primitive.name in _LOOPS_AND_BRANCHES or body_of_call(equation, is_derived=True) is not None


def _numbers(equation: Equation) -> Iterator[str]:
    return (str(atom.val) for atom in equation.invars if isinstance(atom, core.Literal))
