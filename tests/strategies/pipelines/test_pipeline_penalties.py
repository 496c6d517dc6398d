"""Penalties on weights added after the stages of a loss function: the stage with the weights computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.jax.programs.jaxpr import Graph
from strategies.pipelines.stages import cut_in_stages, pipeline_stage

W, V, X = np.eye(3, dtype=np.float32), np.ones((3, 2), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)


def inputs_of_stages(function, *arguments, weights=(0, 1), stages=2):
    """Return, for each stage, the arguments that it reads and the number of values it takes from earlier stages."""
    graph = Graph.of(jax.make_jaxpr(function)(*arguments))
    cut = cut_in_stages(graph, [1] * stages, weights=weights)
    return [(segment.inputs, len(segment.takes)) for (segment,) in cut]


def in_stages(w, v, x):
    with pipeline_stage(0):
        hidden = jnp.tanh(x @ w)
    with pipeline_stage(1):
        return hidden @ v


def squares(weight):
    return 0.01 * (weight**2).sum()


def each_added(w, v, x):
    return in_stages(w, v, x).sum() + squares(w) + squares(v)


def added_first(w, v, x):
    penalty = jax.jit(squares)(w) + squares(v)
    return in_stages(w, v, x).sum() + penalty


def told(w, v, x):
    return in_stages(w, v, x).sum(), squares(w)


@pytest.mark.parametrize(("function", "taken"), [(each_added, 2), (added_first, 2), (told, 1)])
def test_a_penalty_is_computed_by_the_stage_that_has_the_weight(function, taken):
    assert inputs_of_stages(function, W, V, X) == [((0, 2), 0), ((1,), taken)]
    assert inputs_of_stages(function, W, V, X, weights=()) == [((0, 2), 0), ((0, 1), 1)]


def test_a_sum_over_several_stages_is_computed_in_the_last_of_them():
    def function(w, v, u, x):
        penalty = squares(w) + squares(v)
        y = in_stages(w, v, x)
        with pipeline_stage(2):
            return (y @ u).sum() + penalty

    found = inputs_of_stages(function, W, V, np.ones((2, 1), np.float32), X, weights=(0, 1, 2), stages=3)
    assert found == [((0, 3), 0), ((1,), 2), ((2,), 2)]


def cast_for_both(w, v, x):
    number = w[0, 0] + 1
    with pipeline_stage(0):
        hidden = x @ w * number
    with pipeline_stage(1):
        return (hidden @ v * number).sum()


def tied(w, v, x):
    other = jnp.cos(w)
    with pipeline_stage(0):
        hidden = x @ w
    with pipeline_stage(1):
        return (hidden @ other @ v).sum()


@pytest.mark.parametrize("function", [cast_for_both, tied])
def test_values_that_a_stage_also_needs_itself_are_recomputed_in_each_stage(function):
    assert inputs_of_stages(function, W, V, X)[1] == ((0, 1), 1)


@pytest.mark.complete
def test_weights_of_a_penalty_can_be_on_several_devices():
    """The gradients are those of the whole function, with the same bits on one device."""
    given = {"w": W, "v": V}

    def loss_fn(variables, batch, key):
        return each_added(variables["w"], variables["v"], batch)

    def trained(pipeline, devices):
        strategy = strategies.IPUStrategy(2, devices)
        trainer = strategies.Trainer(
            strategy, loss_fn, optax.sgd(0.1), gradient_accumulation_count=4, reduction_method="mean", pipeline=pipeline
        )
        dataset = strategy.distribute_dataset(np.tile(X, (8, 1)), 2, gradient_accumulation_count=4)
        state = trainer.init(given)
        for batch in dataset.epoch(0):
            state, _ = trainer.step(state, batch)
        return jax.tree.map(np.asarray, state.variables)

    apart = trained(strategies.Pipelining([0, 1]), 2)
    assert strategies.fingerprint(apart) == strategies.fingerprint(trained(strategies.Pipelining([0, 0]), 1))
    gradients = jax.grad(lambda variables: each_added(variables["w"], variables["v"], X))(given)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(apart[name], given[name] - 0.1 * gradient, rtol=1e-5)
