"""Buckets of gradients: a traced function is cut into programs that finish its results one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import also

from strategies.jax.programs.buckets import cut_in_buckets
from strategies.jax.programs.segments import Part

WIDTH = 24  # a square matrix of float32 has 2.25 KiB, enough for two pieces
KIB = 1 << 10


def mlp(variables, batch):
    hidden = jax.jit(jax.nn.relu)(batch @ variables["a"] + variables["bias"])
    hidden = jnp.tanh(hidden @ variables["b"])
    return jnp.mean((hidden @ variables["c"]) ** 2)


def nested(variables, batch):
    """Compute nested jits, recomputation, a scan and a custom gradient."""

    @jax.custom_vjp
    def halve(x):
        return x / 2

    halve.defvjp(lambda x: (x / 2, None), lambda _, gradient: (gradient / 2,))
    dense = jax.jit(lambda x, kernel: x @ kernel)
    hidden = jax.nn.gelu(dense(batch, variables["a"]) + variables["bias"])
    hidden, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(h @ kernel), None), hidden, jnp.stack([variables["b"]] * 2))
    hidden = jax.checkpoint(lambda h: jax.nn.silu(dense(h, variables["c"])))(hidden)
    return jnp.mean(halve(hidden) ** 2)


def arguments_of(seed):
    random = np.random.default_rng(seed)
    shapes = {"a": (5, WIDTH), "b": (WIDTH, WIDTH), "bias": (WIDTH,), "c": (WIDTH, WIDTH)}
    variables = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return variables, random.standard_normal((3, 5)).astype(np.float32)


def gradients(loss_fn):
    def found(*arguments):
        value, tree = jax.value_and_grad(loss_fn)(*arguments)
        return (value, *jax.tree.leaves(tree))

    return found


def traced(loss_fn, *arguments):
    return jax.make_jaxpr(gradients(loss_fn))(*arguments)


def run_in_turn(segments, arguments):
    """Return the results of all segments, and the segment that finished each part."""
    residuals, results, places = {}, {}, {}
    for place, segment in enumerate(segments):
        values = segment.function(
            *(arguments[number] for number in segment.inputs), *(residuals[number] for number in segment.takes)
        )
        results.update(zip(segment.parts, values, strict=False))
        places.update(dict.fromkeys(segment.parts, place))
        residuals.update(zip(segment.gives, values[len(segment.parts) :], strict=True))
    return results, places


@pytest.mark.parametrize(("function", "bucket_bytes"), [(mlp, 1), (mlp, KIB), (mlp, 100 * KIB), also(nested, 1)])
def test_segments_compute_the_results_of_the_function(seed, function, bucket_bytes):
    arguments = arguments_of(seed)
    segments = cut_in_buckets(traced(function, *arguments), range(1, 5), bucket_bytes, KIB)
    results, _ = run_in_turn(segments, jax.tree.leaves(arguments))
    for number, leaf in enumerate(gradients(function)(*arguments)):
        pieces = sorted((part.rows or (0,), value) for part, value in results.items() if part.result == number)
        found = pieces[0][1] if len(pieces) == 1 else np.concatenate([piece for _, piece in pieces])
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-5)


def test_results_leave_in_the_order_in_which_they_can_be_finished(seed):
    arguments = arguments_of(seed)
    segments = cut_in_buckets(traced(mlp, *arguments), range(1, 5), KIB, KIB)
    _, places = run_in_turn(segments, jax.tree.leaves(arguments))
    first = min(places, key=places.get)
    assert first == Part(4)  # "c", whose gradient is finished first, as a whole
    assert {places[Part(number)] for number in (0, 1, 3)} == {2}  # the loss, "a" and the bias
    assert places[Part(2, (0, WIDTH // 2))] == 1
    assert places[Part(2, (WIDTH // 2, WIDTH))] == 2


def test_nothing_is_computed_twice_but_movements_of_data(seed):
    arguments = arguments_of(seed)
    closed = traced(mlp, *arguments)
    segments = cut_in_buckets(closed, range(1, 5), KIB, 100 * KIB)  # no pieces
    assert len(segments) > 1

    def count(jaxpr):
        nested = [getattr(e.params["jaxpr"], "jaxpr", e.params["jaxpr"]) for e in jaxpr.eqns if "jaxpr" in e.params]
        own = sum(e.primitive.name in ("dot_general", "tanh", "max") for e in jaxpr.eqns)
        return own + sum(map(count, nested))

    assert sum(count(segment.function.args[0]) for segment in segments) == count(closed.jaxpr)


def test_small_results_are_finished_together():
    def loss_fn(variables, batch):
        return jnp.sum(batch @ variables["a"]) + jnp.sum(variables["b"] ** 2)

    closed = traced(loss_fn, {"a": jnp.ones((3, 3)), "b": jnp.ones(5)}, jnp.ones((2, 3)))
    (only,) = cut_in_buckets(closed, (1, 2), KIB, KIB)
    assert {part.result for part in only.parts} == {0, 1, 2}
    assert not only.takes
    assert not only.gives


def test_a_result_that_is_no_product_stays_whole():
    def loss_fn(variables):
        return jnp.sum(jnp.sin(variables["a"])) + jnp.sum(variables["b"] ** 2)

    segments = cut_in_buckets(traced(loss_fn, {name: jnp.ones((WIDTH, WIDTH)) for name in "ab"}), (1, 2), KIB, KIB)
    assert [part.rows for segment in segments for part in segment.parts] == [None] * 3
    assert len(segments) == 2


def test_residuals_may_have_no_axis():
    def loss_fn(variables):
        scale = jnp.sum(variables["a"])
        return scale * jnp.sum(variables["b"])

    start = {name: jnp.ones((WIDTH, WIDTH)) for name in "ab"}
    segments = cut_in_buckets(traced(loss_fn, start), (1, 2), KIB, 100 * KIB)
    results, _ = run_in_turn(segments, jax.tree.leaves(start))
    assert float(results[Part(0)]) == float(WIDTH**4)
    assert any(segment.gives for segment in segments)


def test_data_movements_are_repeated_instead_of_passed_on():
    def function(x):
        flat = x.reshape(-1)
        return flat.sum(), flat * 2, flat.T * 3

    x = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
    segments = cut_in_buckets(jax.make_jaxpr(function)(x), (1, 2), KIB, 100 * KIB)
    assert len(segments) == 2
    assert not any(segment.gives for segment in segments)
    results, _ = run_in_turn(segments, [x])
    for number, value in enumerate(function(x)):
        np.testing.assert_array_equal(results[Part(number)], value)
