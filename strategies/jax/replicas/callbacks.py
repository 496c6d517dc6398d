"""The callbacks of a compiled program, forced into the order of the code.

XLA:CPU runs independent operations at the same time. A callback that waits for other replicas' callbacks occupies a
thread of XLA's pool. If replicas begin with different callbacks until no thread is left, they wait forever (seen with a
hundred collectives in one program). So each callback is made to depend on the previous one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
from jax.extend import core

from strategies.jax.programs.jaxpr import Equation, bind, bodies, body_of_call, evaluate, every_equation, with_bodies
from strategies.jax.programs.xla_pitfalls import behind, is_true
from strategies.jax.replicas.collective_equations import EQUATION
from strategies.typing import Function, Leaf, Tree

_CALLBACKS = frozenset({"io_callback", EQUATION})


def in_order(function: Function) -> Function:
    """Return the same function with its callbacks in the order of the code; it must not be differentiated any more."""

    def ordered(*arguments: Tree) -> Tree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(closed, jax.tree.leaves(arguments), [])
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _evaluate(closed: core.ClosedJaxpr, arguments: Sequence[Leaf], last: list[Leaf]) -> list[Leaf]:
    """Evaluate a program whose callbacks wait for the values in `last`; put the results of its last callback there."""
    jaxpr = closed.jaxpr
    if not any(map(_is_callback, every_equation(jaxpr))):
        found: list[Leaf] = jax.core.eval_jaxpr(jaxpr, closed.consts, *arguments)
        return found

    def results_of(equation: Equation, given: list[Leaf]) -> list[Leaf]:
        if not _calls_back(equation):
            return bind(jaxpr, equation, given)
        body = body_of_call(equation, is_derived=True)
        if body is None:
            last[:] = bind(jaxpr, with_bodies(equation, _ordered_body), _behind(last, given))
            return list(last)
        # XLA looks inside of calls: before all operands of a call are computed, parts of it may begin.
        if equation.params.get("prevent_cse"):  # a barrier, as in JAX's own lowering of jax.checkpoint
            given = jax.lax.optimization_barrier(given)
        return _evaluate(body, given, last)

    return evaluate(closed, arguments, results_of)


def _behind(last: Sequence[Leaf], given: Sequence[Leaf]) -> list[Leaf]:
    """Return the operands; the smallest of them becomes available only after `last`."""
    changed = list(given)
    if last and given:
        smallest = min(range(len(given)), key=lambda number: jax.numpy.size(given[number]))
        changed[smallest] = behind(is_true(last), jax.numpy.asarray(given[smallest]))
    return changed


def _ordered_body(body: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the body of a loop or branch, with its callbacks in order."""
    if not any(map(_is_callback, every_equation(body.jaxpr))):
        return body
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in body.in_avals]
    return jax.make_jaxpr(lambda *arguments: _evaluate(body, arguments, []))(*shapes)


def _calls_back(equation: Equation) -> bool:
    inside = itertools.chain.from_iterable(map(every_equation, bodies(equation)))
    return any(map(_is_callback, itertools.chain([equation], inside)))


def _is_callback(equation: Equation) -> bool:
    return bool(equation.primitive.name in _CALLBACKS)
