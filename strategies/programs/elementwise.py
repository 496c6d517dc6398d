"""Whether a function computes each element of its arrays without looking at the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core

_ACROSS = frozenset(
    {
        "argmax", "argmin", "cholesky", "concatenate", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin",
        "cumprod", "cumsum", "dot_general", "eig", "eigh", "fft", "gather", "householder_product", "lu", "qr",
        "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor",
        "reduce_window_max", "reduce_window_sum", "rev", "scatter", "scatter-add", "sort", "svd", "top_k",
        "transpose", "triangular_solve", "dynamic_slice", "dynamic_update_slice",
    }
)  # fmt: skip

_BY_PLACE = frozenset({"random_bits", "random_seed", "random_wrap", "random_fold_in", "random_split", "threefry2x32"})
"""What makes elements that follow from their places in the array."""


def first_across_elements(closed: core.ClosedJaxpr) -> str | None:
    """The first operation of a traced function that combines or moves elements of an array, with its operand.

    Returns:
        Such as "reduce_sum of float32[784,1024]"; None where there is none.
    """
    for equation in _equations(closed.jaxpr):
        name = equation.primitive.name
        operands = [atom.aval for atom in equation.invars if getattr(atom.aval, "size", 0) > 1]
        sizes = {getattr(out.aval, "size", 0) for out in equation.outvars}
        made = max(sizes, default=0)
        if name in _BY_PLACE or name.startswith("rng_") or (name == "iota" and made > 1):
            return f"{name}, which follows from the places of elements"
        if operands and (name in _ACROSS or name.startswith("reduce_") and name != "reduce_precision"):
            return f"{name} of {operands[0].str_short()}"
        if any({operand.size} != sizes for operand in operands) and not any(_inner(equation)):  # such as slices
            return f"{name} of {operands[0].str_short()}"
    return None


def operations(closed: core.ClosedJaxpr) -> list[tuple[str, ...]]:
    """The operations of a traced function in order, each with the numbers that it takes, and the function's own."""
    own = tuple(str(value) for value in closed.consts if np.size(value) == 1)
    return [own, *((equation.primitive.name, *_numbers(equation)) for equation in _equations(closed.jaxpr))]


def _numbers(equation: Any) -> Iterator[str]:
    return (str(atom.val) for atom in equation.invars if isinstance(atom, core.Literal))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for body in _inner(equation):
            yield from _equations(body)


def _inner(equation: Any) -> Iterator[Any]:
    """The traced functions of a loop, a branch or a call."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            body = getattr(inner, "jaxpr", inner)
            if hasattr(body, "eqns"):
                yield body
