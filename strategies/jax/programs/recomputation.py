"""Gradients with respect to values inside of a function, and recomputation (Chen et al., 2016).

Semantics: the original's `capture_upstream_gradients`, `GradientCaptureContext` and `GradientCaptureTape`, and its
`recomputation_checkpoint` and recomputation modes, over `jax.checkpoint`. JAX has no tape: a context differentiates a
function, and then holds the captured gradients.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from strategies.jax.programs.feed_program import CALL, current_program
from strategies.jax.programs.jaxpr import Equation, EquationGroup, Graph, carry_out, cut, every_equation
from strategies.jax.programs.xla_pitfalls import behind, is_true, use_right_sums
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
        graph = Graph.of(closed)
        constants = graph.lift_constants()  # because they may be differentiated
        tags = [_tag_of(equation) for equation in graph.equations]
        marks = [number for number, tag in enumerate(tags) if tag in handles]
        ends = [*(number for mark in marks for number in (mark, mark + 1)), len(tags)]
        groups = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        segments = cut(graph, [*map(EquationGroup, groups), EquationGroup((), dict(enumerate(graph.results)))])
        tag_of = {place: tags[own[0]] for place, own in enumerate(groups) if len(own) == 1 and own[0] in marks}

        def compute(number: int, given: list[Leaf]) -> Sequence[Leaf]:
            made = segments[number].function(*given)
            tag = tag_of.get(number)
            return made if tag is None or not made else [_captured(made[0], handles[tag])]

        *_, (_, found) = carry_out(segments, [*constants, *jax.tree.leaves(arguments)], compute)
        return jax.tree.unflatten(jax.tree.structure(shapes), list(found))

    return handled


def _tag_of(equation: Equation) -> str | None:
    is_name = equation.primitive.name == "name" and equation.params["name"].startswith(_MARK)
    return equation.params["name"].removeprefix(_MARK) if is_name else None


@jax.custom_vjp
def _captured(value: jax.Array, handle: jax.Array) -> jax.Array:
    """Return the value; its gradient also goes to the handle, unchanged."""
    return value


_captured.defvjp(lambda value, handle: (value, None), lambda _, slope: (slope, slope))


# ---- recomputation

Marked = TypeVar("Marked")
Policy = Callable[..., Any]

MARK = "recomputation_checkpoint"
_NONE, _BLOCKS = "none", "blocks"


def recomputation_checkpoint(tree: Marked) -> Marked:
    """Mark values of a loss function that are kept for the backward pass. Without recomputation it does nothing.

    A mark cuts the function in two: the equations before it are one block, the equations behind it another.

    Args:
        tree: Pytree of arrays; it is returned.
    """
    marked: Marked = jax.tree.map(lambda leaf: checkpoint_name(leaf, MARK), tree)
    return marked


def recomputing(loss_fn: Function, recompute: str | Policy) -> Function:
    """Return a loss function with the same values and gradients that keeps less for its backward pass.

    Between blocks it keeps the values that one block hands to others. Within a block it keeps nothing, or the values
    that the policy names, and computes the block again when its gradient is needed. Collectives over replicas are never
    repeated.

    Args:
        loss_fn: Traceable function of pytrees of arrays; it may be differentiated once, backward.
        recompute: "none" for `loss_fn` itself; "blocks" to compute again all equations before the last mark; or a
            policy of `jax.checkpoint_policies`, applied to every block.

    Raises:
        ValueError: `recompute` is anything else; or, at tracing with "blocks", there is no mark.
    """
    if recompute == _NONE:
        return loss_fn
    if recompute != _BLOCKS and not callable(recompute):
        raise ValueError(
            f"recompute is {recompute!r}; use 'none', 'blocks', or a policy of jax.checkpoint_policies, such as "
            "jax.checkpoint_policies.dots_saveable"
        )

    @functools.wraps(loss_fn)
    def recomputed(*arguments: Tree) -> Tree:
        program = current_program()

        def traced(token: jax.Array, *arguments: Tree) -> tuple[jax.Array, Tree]:
            with program.inside(token):
                result = loss_fn(*arguments)
                return program.token, result

        closed, (_, shapes) = jax.make_jaxpr(traced, return_shape=True)(program.token, *arguments)
        graph = Graph.of(closed)
        blocks = list(_blocks(graph, None if recompute == _BLOCKS else recompute))
        token, *results = _evaluate(graph, blocks, [program.token, *jax.tree.leaves(arguments)])
        program.advance(token)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return recomputed


# ---- blocks


@dataclass(frozen=True)
class _Block:
    """A block of consecutive equations.

    Attributes:
        equations: Numbers of the equations in the graph, at least one.
        is_repeated: Whether the backward pass evaluates them again.
        policy: Values that are kept all the same.
    """

    equations: range
    is_repeated: bool
    policy: Policy | None = None


def _blocks(graph: Graph, policy: Policy | str | None) -> Iterator[_Block]:
    """Cut behind each mark, and on both sides of equations with effects or collectives."""
    marks = [number for number, equation in enumerate(graph.equations) if is_mark(equation)]
    if policy is None and not marks:
        raise ValueError(
            "recompute is 'blocks', but the loss function has no recomputation_checkpoint; mark the values between its "
            "blocks, outside of scans and loops, or use a policy of jax.checkpoint_policies"
        )
    chosen = policy if callable(policy) else None
    first = 0
    for number, equation in enumerate(graph.equations):
        before = range(first, number)
        if equation.effects:
            if before:
                yield _Block(before, policy is not None or number <= marks[-1], chosen)
            yield _Block(range(number, number + 1), False)
            first = number + 1
        elif is_mark(equation):
            yield _Block(range(first, number + 1), len(before) > 0, chosen)
            first = number + 1
    if first < len(graph.equations):
        yield _Block(range(first, len(graph.equations)), policy is not None, chosen)


def is_mark(equation: Equation) -> bool:
    """Return whether an equation is a `recomputation_checkpoint`."""
    return bool(equation.primitive.name == "name" and equation.params["name"] == MARK)


def _evaluate(graph: Graph, blocks: Sequence[_Block], arguments: Sequence[Leaf]) -> list[Leaf]:
    constants = graph.lift_constants()  # because they may be differentiated
    groups = [EquationGroup(block.equations) for block in blocks]
    segments = cut(graph, [*groups, EquationGroup((), dict(enumerate(graph.results)))])

    def compute(number: int, given: list[Leaf]) -> Sequence[Leaf]:
        segment = segments[number]
        if segment.results:
            return segment.function(*given)
        block = blocks[number]
        if block.is_repeated:
            is_argument = [place >= len(constants) for place in segment.inputs]
            return _repeated(segment.function, block.policy, [*is_argument, *[False] * len(segment.takes)])(*given)
        if graph.equations[block.equations[0]].primitive.name in ("io_callback", CALL):  # no gradient flows through it
            given = [_constant(value) for value in given]
        return segment.function(*given)

    *_, (_, found) = carry_out(segments, [*constants, *arguments], compute)
    return list(found)


# ---- repetition


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["backward", "is_true"],
    meta_fields=["is_hidden", "places", "count", "floats"],
)
@dataclass(frozen=True)
class _Residuals:
    """The values kept from the forward pass of a block.

    Attributes:
        backward: Function from cotangents of floating-point results to cotangents of some arguments; it holds the kept
            values.
        is_true: Scalar that is always True; the compiler does not know this.
        is_hidden: Whether each kept value is hidden from the compiler.
        places: Positions of these arguments.
        count: Number of all arguments.
        floats: Positions of the floating-point results.
    """

    backward: Any
    is_true: jax.Array
    is_hidden: tuple[bool, ...]
    places: tuple[int, ...]
    count: int
    floats: tuple[int, ...]


def _repeated(
    function: Callable[..., Sequence[Leaf]], policy: Policy | None, is_variable: Sequence[bool]
) -> Callable[..., Sequence[Leaf]]:
    """Return the same function, evaluated a second time when its gradient is needed, and not earlier.

    `jax.checkpoint` alone does not achieve that: XLA:CPU drops its barriers. Then it merges the two computations and
    keeps the first, or computes the second early. So the kept values are hidden behind a choice that depends on the
    cotangents. (A branch would work too, but XLA:CPU rewrites convolutions only outside of branches, which changes
    bits.)

    Args:
        function: Function of a block.
        policy: Values that are kept of it.
        is_variable: Whether each argument is one of the whole function, such as a variable. If it is differentiated, it
            is not hidden: hiding copies it, and the second computation waits for other values anyway.
    """

    @jax.custom_vjp
    def repeated(*arguments: Leaf) -> Sequence[Leaf]:
        return function(*arguments)

    def forward(*primals: Leaf) -> tuple[Sequence[Leaf], _Residuals]:
        arguments = [primal.value for primal in primals]
        places = tuple(place for place, primal in enumerate(primals) if primal.perturbed)
        is_float: list[bool] = []

        def of_those(*some: Leaf) -> tuple[list[Leaf], list[Leaf]]:
            every = list(arguments)
            for place, value in zip(places, some, strict=True):
                every[place] = value
            results = function(*every)
            is_float[:] = [jnp.issubdtype(result.dtype, jnp.floating) for result in results]
            floats = [result for result, floating in zip(results, is_float, strict=True) if floating]
            return floats, list(results)

        checkpointed = jax.checkpoint(of_those, policy=policy)
        floats, backward, results = jax.vjp(checkpointed, *(arguments[place] for place in places), has_aux=True)
        numbers = tuple(number for number, floating in enumerate(is_float) if floating)
        shown = [arguments[place] for place in places if is_variable[place]]
        hidden = tuple(all(leaf is not one for one in shown) for leaf in jax.tree.leaves(backward))
        return results, _Residuals(backward, is_true(floats), hidden, places, len(primals), numbers)

    def backward(kept: _Residuals, cotangents: Sequence[Leaf]) -> tuple[Leaf, ...]:
        slopes = [cotangents[number] for number in kept.floats]
        dense = [jnp.zeros(one.shape, one.dtype) if isinstance(one, SymbolicZero) else one for one in slopes]
        is_there = kept.is_true & is_true(dense)
        leaves, structure = jax.tree.flatten(kept.backward)
        leaves = [behind(is_there, leaf) if hide else leaf for leaf, hide in zip(leaves, kept.is_hidden, strict=True)]
        found = jax.tree.unflatten(structure, leaves)(dense)
        of_arguments = dict(zip(kept.places, found, strict=True))
        return tuple(of_arguments.get(place) for place in range(kept.count))

    repeated.defvjp(forward, backward, symbolic_zeros=True)

    def called(*arguments: Leaf) -> list[Leaf]:
        results = repeated(*arguments)
        return [result if jnp.issubdtype(result.dtype, jnp.inexact) else _constant(result) for result in results]

    return called


@jax.custom_jvp
def _constant(value: jax.Array) -> jax.Array:
    """Return a value that JAX does not differentiate, although it differentiates results of custom gradients."""
    return value


@functools.partial(_constant.defjvp, symbolic_zeros=True)
def _constant_jvp(primals: tuple[jax.Array], tangents: Leaf) -> tuple[jax.Array, Leaf]:
    (value,) = primals
    return value, SymbolicZero(jax.typeof(value).to_tangent_aval())
