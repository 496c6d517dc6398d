"""Traced programs: search, evaluation equation by equation, and cutting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from strategies.jax.programs.jaxpr import (
    EquationGroup,
    Graph,
    ancestors,
    bind,
    bodies,
    body_of_call,
    carry_out,
    cut,
    evaluate,
    every_equation,
    is_checkpoint,
    producers_of,
    with_bodies,
)

X = np.linspace(-2, 2, 7, dtype=np.float32)


@jax.custom_vjp
def halve(x):
    return jnp.cos(x) / 2


halve.defvjp(lambda x: (jnp.cos(x) / 2, None), lambda _, gradient: (gradient / 2,))


@jax.custom_jvp
def double(x):
    return jnp.cos(x) * 2


double.defjvp(lambda values, changes: (double(*values), changes[0] * 2))


def names_in(jaxpr):
    return [equation.primitive.name for equation in every_equation(jaxpr)]


def traced(function, *arguments):
    return jax.make_jaxpr(function)(*(arguments or (X,)))


# ---- looking through equations


@pytest.mark.parametrize(
    "function",
    [
        jax.jit(jnp.cos),
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.cos(y), x),
        lambda x: jax.lax.while_loop(lambda y: y[0] > 0, jnp.cos, x),
        lambda x: jax.lax.scan(lambda y, row: (jnp.cos(y), row), x, x),
        jax.checkpoint(jax.jit(jnp.cos)),
        halve,
        double,
        jax.vmap(jax.jit(lambda row: jax.lax.cond(row > 0, jnp.sin, jnp.cos, row))),
    ],
    ids=["jit", "cond", "for", "while", "scan", "checkpoint", "custom_vjp", "custom_jvp", "vmap"],
)
def test_equations_in_loops_branches_and_calls_are_found(function):
    assert "cos" in names_in(traced(function).jaxpr)


def test_the_reducer_of_a_reduction_is_a_program():
    closed = traced(lambda x: jax.lax.reduce(x, np.float32(0), lambda a, b: a + jnp.cos(b), (0,)))
    (reduce,) = closed.jaxpr.eqns
    assert [names_in(body) for body in bodies(reduce)] == [["cos", "add"]]


def test_an_equation_comes_before_its_inner_equations():
    assert names_in(traced(lambda x: jnp.sin(jax.jit(jax.jit(jnp.cos))(x))).jaxpr) == ["jit", "jit", "cos", "sin"]


@pytest.mark.parametrize(
    ("function", "when_derived", "before"),
    [
        (jax.jit(jnp.cos), True, True),
        (halve, True, False),
        (double, True, False),
        (jax.checkpoint(jnp.cos), True, False),
        (jnp.cos, False, False),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.cos(y), x), False, False),
        (lambda x: jax.lax.reduce(x, np.float32(0), lambda a, b: a + jnp.cos(b), (0,)), False, False),
    ],
    ids=["jit", "custom_vjp", "custom_jvp", "checkpoint", "cos", "loop", "reduce"],
)
def test_only_equations_evaluated_once_are_calls(function, when_derived, before):
    """A custom derivative and `jax.checkpoint` are more than a call until the program is differentiated."""
    (equation,) = traced(function).jaxpr.eqns
    body = body_of_call(equation, is_derived=True)
    assert (body is not None) == when_derived
    assert (body_of_call(equation) is not None) == before
    if body is not None:
        np.testing.assert_array_equal(jax.core.eval_jaxpr(body.jaxpr, body.consts, X)[0], function(X))


def test_checkpoints_are_known():
    (plain,), (checkpoint,) = (traced(function).jaxpr.eqns for function in (jax.jit(jnp.cos), jax.checkpoint(jnp.cos)))
    assert is_checkpoint(checkpoint)
    assert not is_checkpoint(plain)


def test_ancestors_are_the_equations_behind_a_value():
    jaxpr = traced(lambda x: (jnp.sin(jnp.cos(x)), jnp.tanh(jnp.cos(x) * x), jnp.exp(x))).jaxpr
    producers = producers_of(jaxpr.eqns)

    def behind(number):
        found = ancestors([jaxpr.outvars[number]], jaxpr.eqns, producers)
        return {jaxpr.eqns[place].primitive.name for place in found}

    assert behind(0) == {"sin", "cos"}
    assert behind(1) == {"tanh", "mul", "cos"}
    assert behind(2) == {"exp"}
    assert ancestors(jaxpr.invars, jaxpr.eqns, producers) == set()


# ---- evaluating


def shaky(x):
    """Compute with a constant, a literal, a result that is an argument, and an operand that comes twice."""
    return x * x + jnp.asarray(X), 2.0, x


def test_programs_are_evaluated_equation_by_equation():
    closed, seen = traced(shaky), []

    def results_of(equation, given):
        seen.append(equation.primitive.name)
        return bind(closed.jaxpr, equation, given)

    total, two, same = evaluate(closed, [X], results_of)
    assert seen == ["mul", "add"]
    np.testing.assert_array_equal(total, X * X + X)
    assert two == 2.0
    assert same is X


def test_an_equation_can_be_evaluated_as_another():
    closed = traced(lambda x: jnp.cos(jnp.sin(x)))

    def results_of(equation, given):
        return given if equation.primitive.name == "sin" else bind(closed.jaxpr, equation, given)

    np.testing.assert_array_equal(evaluate(closed, [X], results_of)[0], jnp.cos(X))


@pytest.mark.parametrize("function", [halve, double], ids=["custom_vjp", "custom_jvp"])
def test_bound_equations_keep_their_own_derivatives(function):
    closed = traced(function)

    def again(x):
        (result,) = evaluate(closed, [x], functools.partial(bind, closed.jaxpr))
        return result.sum()

    np.testing.assert_array_equal(jax.grad(again)(X), jax.grad(lambda x: function(x).sum())(X))


def test_bodies_of_loops_and_branches_can_be_exchanged():
    def sines(body):
        return jax.make_jaxpr(lambda *values: [jnp.sin(value) for value in values])(*body.in_avals)

    for function in (jax.jit(jnp.cos), lambda x: jax.lax.cond(True, jnp.cos, jnp.tanh, x)):
        closed = traced(function)
        last = closed.jaxpr.eqns[-1]
        (found,) = bind(closed.jaxpr, with_bodies(last, sines), [1, X][-len(last.invars) :])
        np.testing.assert_array_equal(found, jnp.sin(X))


# ---- cutting


def deep(weights, x):
    """Compute consecutive blocks with nested calls, a constant, and a result that needs only the first block."""
    first = jax.jit(lambda y: jax.jit(jnp.tanh)(y @ weights[0]))(x)
    hidden = jnp.sin(first @ weights[1]) + jnp.asarray(X[:5])
    return hidden * 2, first.sum(), weights[0], np.float32(3)


ARGUMENTS = [np.random.default_rng(0).standard_normal((2, 5, 5)).astype(np.float32), np.ones((3, 5), np.float32)]


def run(segments, arguments):
    done = carry_out(segments, arguments, lambda number, given: segments[number].function(*given))
    return {
        part: value for number, results in done for part, value in zip(segments[number].results, results, strict=False)
    }


def blocks_of(graph, size):
    """Return groups of `size` equations, and a final group of the results without equations."""
    count = len(graph.equations)
    results = dict(enumerate(graph.results))
    return [*(EquationGroup(range(k, min(k + size, count))) for k in range(0, count, size)), EquationGroup((), results)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_function_can_be_cut_anywhere(size):
    graph = Graph.of(traced(deep, *ARGUMENTS))
    segments = cut(graph, blocks_of(graph, size))
    found = run(segments, ARGUMENTS)
    assert len(segments) == -(-len(graph.equations) // size) + 1
    for number, wanted in enumerate(deep(*ARGUMENTS)):
        np.testing.assert_allclose(found[number], wanted, rtol=1e-6)


def test_calls_are_inlined_and_equations_with_rules_are_not():
    graph = Graph.of(traced(lambda x: halve(jax.jit(jax.jit(jnp.cos))(x))))
    assert [equation.primitive.name for equation in graph.equations] == ["cos", "custom_vjp_call"]


def test_residuals_come_from_other_segments_and_inputs_from_arguments():
    graph = Graph.of(traced(lambda x, y: (jnp.sin(jnp.cos(x)) * y, jnp.exp(y)), X, X))
    places = {equation.primitive.name: number for number, equation in enumerate(graph.equations)}
    first, second = cut(
        graph,
        [
            EquationGroup({places["cos"], places["exp"]}, {1: graph.results[1]}),
            EquationGroup({places["sin"], places["mul"]}, {0: graph.results[0]}),
        ],
    )
    assert (first.inputs, first.takes, first.gives, first.results) == ((0, 1), (), (0,), (1,))
    assert (second.inputs, second.takes, second.gives, second.results) == ((1,), (0,), (), (0,))


def test_repeated_equations_are_not_passed_on():
    graph = Graph.of(traced(lambda x: jnp.sin(jnp.cos(x) * 2)))
    groups = [EquationGroup({0, 1}), EquationGroup({2}, {0: graph.results[0]})]
    _, handed = cut(graph, groups)
    _, repeated = cut(graph, groups, lambda equation: equation.primitive.name in ("cos", "mul"))
    assert handed.takes
    assert not repeated.takes
    assert repeated.inputs == (0,)
    np.testing.assert_array_equal(repeated.function(X)[0], jnp.sin(jnp.cos(X) * 2))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{2}, {0, 1}],
            r"segment 0 reads a result of mul, which is in segment 1; put it in this segment or an earlier one",
        ),
        ([{0}, {2}], r"segment 1 reads a result of mul, which is in none"),
    ],
)
def test_cuts_without_a_valid_order_are_refused(groups, message):
    graph = Graph.of(traced(lambda x: jnp.sin(jnp.cos(x) * 2)))
    with pytest.raises(ValueError, match=message):
        cut(graph, [EquationGroup(equations) for equations in groups])


def test_the_same_function_is_always_cut_into_the_same_segments():
    """Addresses of variables do not matter: compiled programs are found by their content."""

    def many(x):
        handed = [function(x) for function in (jnp.cos, jnp.sin, jnp.tanh, jnp.exp, jnp.abs, jnp.sqrt)]
        return sum(handed[::2]), sum(handed[1::2])

    alive, texts = [], set()
    for _ in range(8):
        alive.append(graph := Graph.of(traced(many)))
        segments = cut(graph, blocks_of(graph, 6))
        texts.add(str([(segment.takes, segment.gives, segment.function.args[0]) for segment in segments]))
    assert len(segments[0].gives) == 6
    assert len(texts) == 1


def test_constants_can_be_arguments():
    constant = jnp.asarray(X)
    graph = Graph.of(traced(lambda x: jax.jit(jnp.cos)(x) + constant))
    values = graph.lift_constants()
    (whole,) = cut(graph, [EquationGroup(range(len(graph.equations)), {0: graph.results[0]})])
    assert whole.inputs == (0, 1)
    np.testing.assert_array_equal(values[0], X)
    np.testing.assert_array_equal(whole.function(X * 3, X)[0], jnp.cos(X) + X * 3)


def test_effects_stay_with_the_segments_that_have_them():
    def calling(x):
        jax.debug.callback(lambda _: None, x)
        return jnp.cos(jnp.sin(x))

    graph = Graph.of(traced(calling))
    at = next(number for number, equation in enumerate(graph.equations) if equation.effects)
    rest = set(range(len(graph.equations))) - {at}
    with_it, without = cut(graph, [EquationGroup({at}), EquationGroup(rest, {0: graph.results[0]})])
    assert with_it.function.args[0].effects
    assert not without.function.args[0].effects
    assert isinstance(without.function.args[0], core.Jaxpr)
