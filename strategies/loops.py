"""Loops that run on the devices and take elements from infeeds."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from strategies.argument_checks import integer
from strategies.data.layout import Replication, is_in_program
from strategies.jax.feeds.infeed import InfeedQueue
from strategies.jax.feeds.iterations import Iteration, differentiable
from strategies.jax.programs.captures import CapturedValues
from strategies.jax.programs.feed_program import FeedProgram, current_program, is_traced, tracing
from strategies.jax.programs.xla_pitfalls import check_no_float64
from strategies.typing import Function, Leaf, Tree

PROGRAMS_KEPT = 64
MOST_ITERATIONS = 2**31 - 1

Values = Sequence[Any]
Body = Function
Condition = Function


def repeat(n: ArrayLike, body: Body, inputs: Tree = None, infeed: InfeedQueue | None = None) -> Tree:
    """Run `body` n times on the device.

    In a function that `strategy.run` compiles, every replica runs the loop and takes its own elements of the infeed.
    If Python calls `repeat` directly, the loop is compiled once per body and runs on one device as one replica.

    Example::

        total = loops.repeat(10, lambda total, x: total + x, [jnp.float32(0)], infeed)

    Args:
        n: Number of iterations: an integer, or a scalar integer array that the program computes.
        body: `body(*inputs, *element)` returns the next inputs. An element that is a dictionary is passed as keyword
            arguments. Results after the inputs must be None, as `OutfeedQueue.enqueue` returns.
        inputs: Loop variables: a list or tuple of pytrees, or one array or dictionary.
        infeed: Queue that gives each iteration one element. With n = 0 nothing is taken from it.

    Returns:
        The final loop variables: a list if there are several, the variable itself if there is one, None without any.
        If n is known at compile time, gradients flow through the loop.

    Raises:
        TypeError: If the loop variables change their structure, shapes or dtypes, or `body` takes other arguments.
        ValueError: If n is negative or above 2**31 - 1; or `body` takes no elements, so the infeed "has not been
            dequeued".
        EndOfDataError: If the infeed has too few elements.
    """
    return _run(_Loop.of(None, body, inputs, infeed), inputs, _count("n", n))


def while_loop(
    condition: Condition,
    body: Body,
    inputs: Tree = None,
    infeed: InfeedQueue | None = None,
    maximum_iterations: ArrayLike | None = None,
) -> Tree:
    """Run `body` on the device while `condition(*inputs)` is true.

    Args:
        condition: Function of the loop variables that returns a boolean scalar.
        body: `body(*inputs, *element)` returns the next inputs, as in `repeat`.
        inputs: Loop variables: a list or tuple of pytrees, or one array or dictionary.
        infeed: Queue that gives each iteration one element.
        maximum_iterations: Largest number of iterations: an integer, or a scalar integer array that the program
            computes.

    Returns:
        The final loop variables, as `repeat` returns them. Reverse-mode gradients do not flow through the loop.

    Raises:
        TypeError: If the condition is not a boolean scalar; also for the reasons of `repeat`.
        ValueError: For the reasons of `repeat`.
        EndOfDataError: If the infeed has too few elements.
    """
    _require_function("condition", condition)
    count = None if maximum_iterations is None else _count("maximum_iterations", maximum_iterations)
    return _run(_Loop.of(condition, body, inputs, infeed), inputs, count)


@dataclass(frozen=True)
class _Loop:
    """A loop without the values of its variables.

    Attributes:
        condition: Function that decides whether to go on; None if only the number of iterations decides.
        body: Function of one iteration.
        infeed: Weak reference to the queue of elements, because compiled loops are kept longer than queues.
        structure: Structure of the list of loop variables.
        shapes: Shape and dtype of each array in the loop variables.
    """

    condition: Condition | None
    body: Body
    infeed: weakref.ref[InfeedQueue] | None
    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @classmethod
    def of(cls, condition: Condition | None, body: Body, inputs: Tree, infeed: InfeedQueue | None) -> _Loop:
        _require_function("body", body)
        if infeed is not None and not isinstance(infeed, InfeedQueue):
            raise TypeError(f"the infeed is a {type(infeed).__name__}; make an InfeedQueue of the data set")
        leaves, structure = jax.tree.flatten(_listed(inputs))
        shapes = tuple((jnp.shape(leaf), jnp.asarray(leaf).dtype) for leaf in check_no_float64(leaves))
        return cls(condition, body, None if infeed is None else weakref.ref(infeed), structure, shapes)

    def flat_body(self, program: FeedProgram) -> Callable[..., tuple[Leaf, ...]]:
        """Return `(token, number, *element, *leaves) -> (token, *collected, *leaves)` of one iteration."""

        def iterate(token: jax.Array, number: jax.Array, *arrays: jax.Array) -> tuple[Leaf, ...]:
            count = len(arrays) - len(self.shapes)
            variables = jax.tree.unflatten(self.structure, arrays[count:])
            with program.inside(token, number):
                elements, named = self._elements(len(variables), arrays[:count])
                result = self.body(*variables, *elements, **named)
                return (program.token, *program.collected_arrays, *self._checked(result))

        return iterate

    def flat_condition(self, *leaves: jax.Array) -> jax.Array:
        assert self.condition is not None
        answer = jnp.asarray(self.condition(*jax.tree.unflatten(self.structure, leaves)))
        if answer.shape != () or answer.dtype != np.bool_:
            raise TypeError(f"the condition returned {answer.dtype}{list(answer.shape)}; it must be a boolean scalar")
        return answer

    def _elements(self, variables: int, element: Sequence[Leaf]) -> tuple[Sequence[Tree], dict[str, Tree]]:
        infeed = self.queue
        if infeed is None:
            self._check_arguments(variables, 0, ())
            return (), {}
        positional, named = infeed.spec.arguments(list(element))
        self._check_arguments(variables, len(positional), tuple(named))
        return positional, dict(named)

    @property
    def queue(self) -> InfeedQueue | None:
        """The infeed; None without one, or after it was deleted."""
        return None if self.infeed is None else self.infeed()

    def _check_arguments(self, variables: int, elements: int, names: Sequence[str]) -> None:
        if _takes(self.body, variables + elements, names):
            return
        if (elements or names) and _takes(self.body, variables, ()):
            raise ValueError(
                "The infeed queue has not been dequeued: the body of the loop takes only the loop variables; let it "
                "take the elements too, or leave out the infeed"
            )
        taken = [f"{variables} loop variables", f"{elements} elements of the infeed" if elements else ""]
        taken.append(f"the keywords {', '.join(names)} of the infeed" if names else "")
        raise TypeError(f"the body of the loop does not take its arguments: {' and '.join(filter(None, taken))}")

    def _checked(self, result: Tree) -> list[jax.Array]:
        """Return the leaves of the body's result, after checking that they can be the next loop variables."""
        count = len(jax.tree.unflatten(self.structure, [None] * len(self.shapes)))
        leaves, structure = jax.tree.flatten(_next_variables(result, count, self.structure))
        check_no_float64(leaves, "output")
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        shapes = tuple((array.shape, array.dtype) for array in arrays)
        if structure != self.structure or shapes != self.shapes:
            before, after = (
                jax.tree.unflatten(tree, [f"{dtype}{list(shape)}" for shape, dtype in of])
                for tree, of in ((self.structure, self.shapes), (structure, shapes))
            )
            raise TypeError(
                f"the body of the loop takes the loop variables {before} but returns {after}; they must be the same"
            )
        return arrays


def _run(loop: _Loop, inputs: Tree, count: Leaf) -> Tree:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(_listed(inputs))]
    if is_in_program():
        results = _inline(loop, current_program(), leaves, count)
    elif is_traced([*leaves, count]):
        results = _inline_alone(loop, leaves, count)
    else:
        results = _call(loop, leaves, count)
    variables = jax.tree.unflatten(loop.structure, results)
    return variables[0] if len(variables) == 1 else variables or None


def _inline(loop: _Loop, program: FeedProgram, leaves: Values, count: Leaf) -> Values:
    """Put the loop into the program that is being traced."""
    token = program.token
    iteration = Iteration.of(loop.flat_body(program), program, loop.queue, leaves)
    condition = None if loop.condition is None else loop.flat_condition
    if condition is not None or not isinstance(count, int):
        token, *results = iteration.run(condition, iteration.body.consts, token, leaves, count)
    else:
        token, *results = differentiable(iteration, count)(iteration.body.consts, token, leaves)
    program.advance(token)
    return results


def _inline_alone(loop: _Loop, leaves: Values, count: Leaf) -> Values:
    """Run the loop inside the user's own `jax.jit` or `jax.grad`."""
    with tracing(current_program()) as program:
        return _inline(loop, program, leaves, count)


class _Program:
    """A compiled loop of one replica."""

    def __init__(self, loop: _Loop, leaves: Values, count: Leaf) -> None:
        self._error: BaseException | None = None
        self._constants: Sequence[Callable[[], bool]] = ()
        self._token = jnp.int32(0)
        self._loop = loop
        self._closed = jax.make_jaxpr(self._trace)(self._token, count, leaves)
        self._compiled = jax.jit(jax.extend.core.jaxpr_as_fun(self._closed))

    @property
    def is_constant(self) -> bool:
        """Whether the compiled loop can be called again; not if it holds tracers of a differentiated function."""
        return not any(isinstance(constant, jax.core.Tracer) for constant in self._closed.consts)

    def _trace(self, token: Leaf, count: Leaf, leaves: Values) -> Values:
        program = FeedProgram(np.int32(0), Replication(range(1), 1), self._report, token)
        reads = [
            CapturedValues(function) for function in (self._loop.condition, self._loop.body) if function is not None
        ]
        with tracing(program):
            results = _inline(self._loop, program, leaves, count)
        for read in reads:
            read.settle()
        self._constants = [*program.constants, *(read.is_same for read in reads)]
        return [program.token, *results]

    @property
    def is_current(self) -> bool:
        """Whether the outside variables that the loop reads are unchanged since it was traced."""
        return all(is_same() for is_same in self._constants)

    def _report(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, leaves: Values, count: Leaf) -> Values:
        self._error = None
        results: Values
        _, *results = jax.block_until_ready(self._compiled(*jax.tree.leaves((self._token, count, leaves))))
        if self._error is not None:
            raise self._error
        return results


_programs: OrderedDict[Any, _Program] = OrderedDict()


def _call(loop: _Loop, leaves: Values, count: Leaf) -> Values:
    """Run the loop; compile it first if no current compiled loop exists."""
    dynamic = None if count is None else jnp.asarray(count, jnp.int32)
    program = _programs.get(loop)
    if program is None or not program.is_current:
        program = _Program(loop, leaves, dynamic)
        if not program.is_constant:
            return _inline_alone(loop, leaves, count)
        _programs[loop] = program
        if len(_programs) > PROGRAMS_KEPT:
            _programs.popitem(last=False)
    return program(leaves, dynamic)


def _count(name: str, n: object) -> Leaf:
    """Return a count as an int, or as an array that the program computes."""
    if isinstance(n, jax.Array) and n.shape == () and jnp.issubdtype(n.dtype, jnp.integer):
        return n
    count = integer(n)
    if count is None:
        raise TypeError(f"{name} is {n!r}; it must be an integer, or a scalar integer array")
    if count < 0:
        raise ValueError(f"{name} is {count}; a loop runs 0 times or more")
    if count > MOST_ITERATIONS:
        raise ValueError(
            f"{name} is {count}; a loop runs at most {MOST_ITERATIONS} times: use several loops, or no limit"
        )
    return count


def _require_function(name: str, function: object) -> None:
    if not callable(function):
        raise TypeError(f"the {name} of the loop is {function!r}, a {type(function).__name__}; use a function")


def _listed(inputs: Tree) -> list[Tree]:
    if inputs is None:
        return []
    return list(inputs) if isinstance(inputs, list | tuple) else [inputs]


def _next_variables(result: Tree, count: int, structure: jax.tree_util.PyTreeDef) -> list[Tree]:
    """Return the body's loop variables as a list, without the None results of `enqueue`."""
    if count == 1 and jax.tree.structure([result]) == structure:
        return [result]
    values = _listed(result)
    variables, others = values[:count], values[count:]
    if any(value is None for value in variables) and len(values) > count:
        raise ValueError("the body of the loop returns None before a loop variable; return the loop variables first")
    return variables if all(value is None for value in others) else values


def _takes(function: Function, positional: int, names: Sequence[str]) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of libraries have no signature
        return True
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(names))
    except TypeError:
        return False
    return True
