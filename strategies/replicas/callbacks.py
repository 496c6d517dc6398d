"""The callbacks of a compiled program, one after another.

XLA:CPU runs at the same time what does not depend on each other, and a callback that waits for those of other replicas
keeps a thread of its pool. Where replicas begin with different ones until no thread is left, they wait for ever (seen
with a hundred collectives in one program). So each callback is made to depend on the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from strategies.programs.dependencies import behind, is_true
from strategies.replicas.collective_equations import EQUATION

_CALLBACKS = frozenset({"io_callback", EQUATION})
_BODIES = (core.Jaxpr, core.ClosedJaxpr)
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_vjp_call", "custom_jvp_call"})


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with its callbacks in the order of the code; not to be differentiated any more."""

    def ordered(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(closed, jax.tree.leaves(arguments), [])
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _evaluate(closed: core.ClosedJaxpr, arguments: Sequence[Any], last: list[Any]) -> list[Any]:
    """Evaluate it, with callbacks behind `last`, which becomes the results of its own last callback."""
    jaxpr: Any = closed.jaxpr
    if not _calls_back(jaxpr):
        found: list[Any] = jax.core.eval_jaxpr(jaxpr, closed.consts, *arguments)
        return found
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if _is_call(equation) and _equation_calls_back(equation):
            if equation.params.get("prevent_cse"):  # as JAX does where it lowers jax.checkpoint
                given = jax.lax.optimization_barrier(given)
            body = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
            results = _evaluate(body, given, last)
        elif _equation_calls_back(equation):
            results = _bind(jaxpr, _with_ordered_bodies(equation), _behind(last, given))
            last[:] = results
        else:
            results = _bind(jaxpr, equation, given)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_call(equation: Any) -> bool:
    """Whether XLA sees what is inside only: where operands are not there yet, some of it may begin."""
    return equation.primitive.name in _CALLS or "prevent_cse" in equation.params


def _bind(jaxpr: Any, equation: Any, given: Sequence[Any]) -> list[Any]:
    """Evaluate one equation, with what surrounds it."""
    fresh = [core.Var(atom.aval) for atom in equation.invars]  # an operand may come twice
    out = [core.Var(variable.aval) for variable in equation.outvars]
    one = jaxpr.replace(
        constvars=[],
        invars=fresh,
        outvars=out,
        eqns=[equation.replace(invars=fresh, outvars=out)],
        effects=equation.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    results: list[Any] = jax.core.eval_jaxpr(one, (), *given)
    return results


def _behind(last: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The operands, the smallest of which is there only when `last` is."""
    changed = list(given)
    if last and given:
        smallest = min(range(len(given)), key=lambda number: jax.numpy.size(given[number]))
        changed[smallest] = behind(is_true(last), jax.numpy.asarray(given[smallest]))
    return changed


def _with_ordered_bodies(equation: Any) -> Any:
    """A loop or branch whose bodies have their callbacks in order."""
    params = {name: _ordered_body(value) for name, value in equation.params.items()}
    return equation.replace(params=params)


def _ordered_body(value: Any) -> Any:
    if isinstance(value, tuple) and any(isinstance(one, core.ClosedJaxpr) for one in value):
        return tuple(_ordered_body(one) for one in value)
    if not isinstance(value, core.ClosedJaxpr) or not _calls_back(value.jaxpr):
        return value
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in value.in_avals]
    return jax.make_jaxpr(lambda *arguments: _evaluate(value, arguments, []))(*shapes)


def _equation_calls_back(equation: Any) -> bool:
    if equation.primitive.name in _CALLBACKS:
        return True
    values = [one for value in equation.params.values() for one in (value if isinstance(value, tuple) else (value,))]
    return any(_calls_back(value) for value in values if isinstance(value, _BODIES))


def _calls_back(jaxpr: Any) -> bool:
    return any(_equation_calls_back(equation) for equation in jaxpr.eqns)
