"""Every product rounded by itself, so that elements have the same bits wherever in an array they lie.

XLA's CPU backend lets LLVM contract a product and a sum to one operation with a single rounding (a fused multiply-add).
Of two products that are added only one can be, and which one it is depends on the loop around them: on its length, on
whether it is vectorised, and on what else is fused into it. So an update of a part of an array could differ in the last
bit from that of the whole; seen with AdamW behind a clip, Adan, schedule-free and `optax.MultiSteps`. Without it
sums, products, quotients and square roots are those of IEEE 754, which leaves no choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from strategies.programs.dependencies import is_true
from strategies.programs.jaxpr import Equation, Variable, bind, body_of_call, evaluate, variables

# What ends in a product, or may after XLA has rewritten it.
_PRODUCTS = frozenset(
    {"mul", "square", "integer_pow", "div", "pow", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic"}
)


def with_rounded_products(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in which no product is contracted with the sum that it goes into; traceable.

    Args:
        function: of pytrees of arrays, one of which is not empty. Loops, branches and calls in it are looked into; it
            is not differentiated.
    """

    def rounded(*arguments: Any, **named: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments, **named)
        leaves = jax.tree.leaves((arguments, named))
        found = next(leaf for leaf in leaves if leaf.size)
        zero = jnp.where(is_true([found]), jnp.uint32(0), jnp.uint32(1))  # the compiler does not know that it is 0
        results = _evaluate(closed, leaves, zero)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rounded


def _evaluate(closed: core.ClosedJaxpr, arguments: Sequence[Any], zero: jax.Array) -> list[Any]:
    summed = set(_summed(closed.jaxpr))

    def results_of(equation: Equation, given: list[Any]) -> Sequence[Any]:
        results = _results(closed.jaxpr, equation, given, zero)
        if equation.primitive.name in _PRODUCTS and equation.outvars[0] in summed:
            results = [_rounded(results[0], zero)]
        return results

    return evaluate(closed, arguments, results_of)


def _summed(jaxpr: core.Jaxpr) -> Iterator[Variable]:
    """What goes into anything but products, so perhaps into a sum.

    Of other products XLA may choose the form: it makes one division of two, which is the same everywhere, and faster.
    """
    read = [equation.invars for equation in jaxpr.eqns if equation.primitive.name not in _PRODUCTS]
    return variables(itertools.chain(*read, jaxpr.outvars))


def _results(like: core.Jaxpr, equation: Equation, given: Sequence[Any], zero: jax.Array) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name in ("sqrt", "rsqrt"):
        root = _rounded(jax.lax.sqrt(given[0]), zero)
        return [root if name == "sqrt" else jnp.ones_like(root) / root]
    if name == "cond":
        return _chosen(params["branches"], given, zero)
    if name == "while":
        return _repeated(params, given, zero)
    if name == "scan":
        return _scanned(equation, given, zero)
    body = body_of_call(equation, is_derived=True)
    return bind(like, equation, given) if body is None else _evaluate(body, given, zero)


def _rounded(product: jax.Array, zero: jax.Array) -> jax.Array:
    """The product, by way of integers, through which LLVM does not contract."""
    if not jnp.issubdtype(product.dtype, jnp.floating):
        return product
    words = jnp.dtype(f"uint{8 * product.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(product, words) ^ zero.astype(words)
    return jax.lax.bitcast_convert_type(bits, product.dtype)


# ---- loops and branches


def _closed(body: core.ClosedJaxpr, zero: jax.Array) -> Callable[..., list[Any]]:
    return lambda *given: _evaluate(body, given, zero)


def _chosen(branches: Sequence[Any], given: Sequence[Any], zero: jax.Array) -> Sequence[Any]:
    index, *operands = given
    results: list[Any] = jax.lax.switch(index, [_closed(branch, zero) for branch in branches], *operands)
    return results


def _repeated(params: Any, given: Sequence[Any], zero: jax.Array) -> Sequence[Any]:
    of_condition, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    is_wanted, body = (_closed(params[name], zero) for name in ("cond_jaxpr", "body_jaxpr"))
    results: list[Any] = jax.lax.while_loop(
        lambda state: is_wanted(*given[:of_condition], *state)[0],
        lambda state: body(*given[of_condition:of_body], *state),
        list(given[of_body:]),
    )
    return results


def _scanned(equation: Equation, given: Sequence[Any], zero: jax.Array) -> Sequence[Any]:
    inner = equation.params["jaxpr"]
    body = _closed(inner, zero)
    # How many are carried, and how many cut into rows, is told by their shapes; the parameters for it have changed.
    cut = sum(outer.aval.ndim > row.aval.ndim for outer, row in zip(equation.invars, inner.jaxpr.invars, strict=True))
    carried = sum(
        outer.aval.ndim == result.aval.ndim for outer, result in zip(equation.outvars, inner.jaxpr.outvars, strict=True)
    )
    last = len(given) - cut
    first = last - carried

    def step(state: Any, rows: Any) -> tuple[list[Any], list[Any]]:
        results = body(*given[:first], *state, *rows)
        return results[:carried], results[carried:]

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    state, rows = jax.lax.scan(step, list(given[first:last]), list(given[last:]), **options)
    return [*state, *rows]
