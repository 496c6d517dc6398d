"""Whether a function computes each element of its arrays without looking at the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax.extend import core

from strategies.programs.jaxpr import Equation, body_of_call, every_equation

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
"""What makes elements that follow from their places in the array."""


def first_across_elements(closed: core.ClosedJaxpr) -> str | None:
    """The first operation of a traced function that combines or moves elements of an array, with its operand.

    Returns:
        Such as "reduce_sum of float32[784,1024]"; None where there is none.
    """
    for equation in every_equation(closed.jaxpr):
        name = equation.primitive.name
        operands = [atom.aval for atom in equation.invars if getattr(atom.aval, "size", 0) > 1]
        sizes = {getattr(out.aval, "size", 0) for out in equation.outvars}
        made = max(sizes, default=0)
        if name in _BY_PLACE or name.startswith("rng_") or (name == "iota" and made > 1):
            return f"{name}, which follows from the places of elements"
        if operands and (name in _ACROSS or name.startswith("reduce_") and name != "reduce_precision"):
            return f"{name} of {operands[0].str_short()}"
        if any({operand.size} != sizes for operand in operands) and not _is_looked_into(equation):  # such as slices
            return f"{name} of {operands[0].str_short()}"
    return None


def operations(closed: core.ClosedJaxpr) -> list[tuple[str, ...]]:
    """The operations of a traced function in order, each with the numbers that it takes, and the function's own."""
    own = tuple(str(value) for value in closed.consts if np.size(value) == 1)
    return [own, *((equation.primitive.name, *_numbers(equation)) for equation in every_equation(closed.jaxpr))]


def _is_looked_into(equation: Equation) -> bool:
    """Whether all that it does with elements are equations of the programs in it."""
    return equation.primitive.name in _LOOPS_AND_BRANCHES or body_of_call(equation, is_derived=True) is not None


def _numbers(equation: Equation) -> Iterator[str]:
    return (str(atom.val) for atom in equation.invars if isinstance(atom, core.Literal))
