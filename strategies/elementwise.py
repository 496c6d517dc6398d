"""Whether a function computes each element of its arrays without looking at the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
        made = max((getattr(out.aval, "size", 0) for out in equation.outvars), default=0)
        if name in _BY_PLACE or name.startswith("rng_") or (name == "iota" and made > 1):
            return f"{name}, which follows from the places of elements"
        if operands and (name in _ACROSS or name.startswith("reduce_") and name != "reduce_precision"):
            return f"{name} of {operands[0].str_short()}"
    return None


def operations(closed: core.ClosedJaxpr) -> list[str]:
    """The names of all operations of a traced function, in order."""
    return [equation.primitive.name for equation in _equations(closed.jaxpr)]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                body = getattr(inner, "jaxpr", inner)
                if hasattr(body, "eqns"):
                    yield from _equations(body)
