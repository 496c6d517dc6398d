"""Gradients with respect to values inside of a function, found by tags.

Semantics: the original's `capture_upstream_gradients`, `GradientCaptureContext` and `GradientCaptureTape`. JAX has no
tape: a context differentiates a function, and then holds the captured gradients.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from strategies.jax.programs.jaxpr import Equation, EquationGroup, Graph, cut, every_equation
from strategies.jax.programs.segments import Part, carry_out
from strategies.jax.programs.xla_pitfalls import use_right_sums
from strategies.typing import Function, Leaf, Tree

_MARK = "capture_upstream_gradients of "


def capture_upstream_gradients(input: jax.Array, tag: str) -> jax.Array:
    """Mark an array whose gradient a `GradientCaptureContext` captures. Without a context it does nothing.

    Args:
        input: Array of a floating-point dtype; it is returned.
        tag: Name under which the gradient is found. Each tag marks one array of a function, outside of loops and
            branches.

    Raises:
        TypeError: The tag is not a string, or the array has no gradient.
    """
    if not isinstance(tag, str):
        raise TypeError(f"the tag of a captured gradient is {tag!r}, a {type(tag).__name__}; use a string")
    array = jnp.asarray(input)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"the array captured as {tag!r} is {array.dtype}, which has no gradient; mark a floating-point array"
        )
    marked: jax.Array = checkpoint_name(array, _MARK + tag)
    return marked


class GradientCaptureContext:
    """A context that differentiates functions, and holds the gradients of arrays marked in them.

    In `gradient_capture_context` of an `OptimizerFunctionOutput` it holds the gradients of the pipeline's last update.

    Example:
        >>> from strategies import GradientCaptureContext, capture_upstream_gradients
        >>> context = GradientCaptureContext()
        >>> def loss(weight):
        ...     hidden = capture_upstream_gradients(3 * weight, "hidden")
        ...     return hidden**2
        >>> float(context.grad(loss)(2.0))
        36.0
        >>> float(context.captured_gradients["hidden"])
        12.0
    """

    def __init__(self) -> None:
        self._captured: Mapping[str, ArrayLike] | None = None
        use_right_sums(os.environ)  # differentiating may start JAX before there is a strategy

    def __enter__(self) -> GradientCaptureContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Do nothing: the captured gradients stay."""

    @property
    def captured_gradients(self) -> Mapping[str, ArrayLike]:
        """The gradients of the last differentiation, by their tags.

        Raises:
            RuntimeError: Nothing has been differentiated.
        """
        if self._captured is None:
            raise RuntimeError(
                "no gradient was captured yet; call a function that grad or value_and_grad of this context has "
                "returned, or run the pipeline whose OptimizerFunctionOutput has this context"
            )
        return self._captured

    def take(self, captured: Mapping[str, ArrayLike]) -> None:
        """Replace the captured gradients."""
        self._captured = captured

    def value_and_grad(self, function: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
        """Differentiate like `jax.value_and_grad`; a call of the result captures the marked gradients.

        Inside of `jax.jit` the captured gradients are traced values; the jitted function must return them to be read.
        """
        places = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        def differentiated(*arguments: Tree) -> Tree:
            shapes = shapes_by_tag(jax.make_jaxpr(function)(*arguments))
            handles = {tag: jnp.zeros(shape.shape, shape.dtype) for tag, shape in shapes.items()}
            of_all = jax.value_and_grad(with_handles(function), (0, *(1 + place for place in places)), has_aux)
            value, (captured, *gradients) = of_all(handles, *arguments)
            self.take(captured)
            return value, (gradients[0] if isinstance(argnums, int) else tuple(gradients))

        return differentiated

    def grad(self, function: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
        """Differentiate like `jax.grad`; a call of the result captures the marked gradients."""
        both = self.value_and_grad(function, argnums, has_aux)

        def differentiated(*arguments: Tree) -> Tree:
            value, gradients = both(*arguments)
            return (gradients, value[1]) if has_aux else gradients

        return differentiated


def shapes_by_tag(closed: jax.extend.core.ClosedJaxpr) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the marked arrays of a traced function.

    Raises:
        ValueError: A tag marks two arrays, or an array in a loop or branch.
    """
    found: dict[str, jax.ShapeDtypeStruct] = {}
    graph = Graph.of(closed)
    for equation in graph.equations:
        if (tag := _tag_of(equation)) is None:
            continue
        if tag in found:
            raise ValueError(f"the tag {tag!r} of a captured gradient marks two arrays; use one tag for each array")
        shape = equation.outvars[0].aval
        found[tag] = jax.ShapeDtypeStruct(shape.shape, shape.dtype)
    tags = {tag for one in every_equation(closed.jaxpr) if (tag := _tag_of(one)) is not None}
    if hidden := tags - found.keys():
        raise ValueError(
            f"the tag {min(hidden)!r} of a captured gradient is in a loop, a branch or a function with custom "
            "derivatives, where its array has no gradient of its own; mark an array outside"
        )
    return found


def with_handles(function: Function) -> Function:
    """Return `(handles, *arguments) -> results`; the gradient of a handle is the gradient of a marked array.

    Handles are by tags, and have the shapes and dtypes of the marked arrays. Their values are not read, and marks
    without a handle do nothing. Arguments and results are pytrees.
    """

    def handled(handles: Mapping[str, jax.Array], *arguments: Tree) -> Tree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(Graph.of(closed), handles, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return handled


def _evaluate(graph: Graph, handles: Mapping[str, jax.Array], arguments: Sequence[Leaf]) -> list[Leaf]:
    constants = graph.lift_constants()  # because they may be differentiated
    tags = [_tag_of(equation) for equation in graph.equations]
    marks = [number for number, tag in enumerate(tags) if tag in handles]
    ends = [*(number for mark in marks for number in (mark, mark + 1)), len(tags)]
    groups = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    results = {Part(number): atom for number, atom in enumerate(graph.results)}
    segments = cut(graph, [*map(EquationGroup, groups), EquationGroup((), results)])
    tag_of = {place: tags[own[0]] for place, own in enumerate(groups) if len(own) == 1 and own[0] in marks}

    def compute(number: int, given: list[Leaf]) -> Sequence[Leaf]:
        made = segments[number].function(*given)
        tag = tag_of.get(number)
        return made if tag is None or not made else [_captured(made[0], handles[tag])]

    *_, (_, found) = carry_out(segments, [*constants, *arguments], compute)
    return list(found)


def _tag_of(equation: Equation) -> str | None:
    is_name = equation.primitive.name == "name" and equation.params["name"].startswith(_MARK)
    return equation.params["name"].removeprefix(_MARK) if is_name else None


@jax.custom_vjp
def _captured(value: jax.Array, handle: jax.Array) -> jax.Array:
    """Return the value; its gradient also goes to the handle, unchanged."""
    return value


_captured.defvjp(lambda value, handle: (value, None), lambda _, slope: (slope, slope))
