"""Recomputation: the same bits from less memory."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from popdist.examples.digits_models import MODELS
from strategies.jax.programs.recomputation import recomputation_checkpoint, recomputing

LAYERS, WIDTH, ROWS = 6, 64, 512
POLICY = jax.checkpoint_policies.dots_saveable


def deep_mlp(variables, batch, key):
    hidden = batch["x"]
    for number, layer in enumerate(variables):
        hidden = jax.nn.gelu(hidden @ layer["kernel"] + layer["bias"])
        if number == LAYERS // 2:
            kept = jax.random.bernoulli(key, 0.9, hidden.shape)
            hidden = jnp.where(kept, hidden / 0.9, 0)
        if number % 2:
            hidden = recomputation_checkpoint(hidden)
    return jnp.mean((hidden - batch["y"]) ** 2), {"largest": hidden.max()}


def small_cnn(variables, batch, key):
    """Return the model of the examples, with a mark between its convolution and its dense layers."""
    conv = variables["conv"]
    dimensions = ("NHWC", "HWIO", "NHWC")
    features = jax.lax.conv_general_dilated(batch["x"], conv["kernel"], (1, 1), "VALID", dimension_numbers=dimensions)
    features = jax.nn.relu(features + conv["bias"])
    features = jax.lax.reduce_window(features, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    features = recomputation_checkpoint(features.reshape(len(features), -1))
    hidden = jax.nn.relu(features @ variables["hidden"]["kernel"] + variables["hidden"]["bias"])
    logits = recomputation_checkpoint(hidden) @ variables["logits"]["kernel"] + variables["logits"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), {"logit": logits.max()}


def drawn(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def mlp_task():
    rng = np.random.default_rng(0)
    variables = [
        {"kernel": drawn(rng, WIDTH, WIDTH) / np.float32(WIDTH**0.5), "bias": np.full(WIDTH, 0.01, np.float32)}
        for _ in range(LAYERS)
    ]
    batch = {"x": drawn(rng, ROWS, WIDTH), "y": drawn(rng, ROWS, WIDTH)}
    return SimpleNamespace(loss_fn=deep_mlp, variables=variables, batch=batch)


def cnn_task():
    rng = np.random.default_rng(0)
    batch = {"x": rng.random((ROWS, 8, 8, 1), np.float32), "label": rng.integers(0, 10, ROWS).astype(np.int32)}
    variables = MODELS["cnn"].init(0, (8, 8, 1))
    variables["logits"]["kernel"] += 0.1 * rng.standard_normal((8, 10)).astype(np.float32)
    return SimpleNamespace(loss_fn=small_cnn, variables=variables, batch=batch)


@functools.cache
def compiled(make_task, recompute):
    task = make_task()
    function = jax.value_and_grad(recomputing(task.loss_fn, recompute), has_aux=True)
    return jax.jit(function).lower(task.variables, task.batch, jax.random.key(1)).compile(), task


def bits_of(make_task, recompute):
    program, task = compiled(make_task, recompute)
    results = program(task.variables, task.batch, jax.random.key(1))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]


@pytest.mark.parametrize(
    ("make_task", "recompute"),
    [
        pytest.param(mlp_task, "blocks", id="mlp-blocks"),
        pytest.param(mlp_task, POLICY, id="mlp-policy", marks=pytest.mark.complete),
        pytest.param(cnn_task, POLICY, id="cnn-policy", marks=pytest.mark.complete),
        pytest.param(cnn_task, "blocks", id="cnn-blocks", marks=pytest.mark.complete),
    ],
)
def test_losses_metrics_and_gradients_have_the_same_bits(make_task, recompute):
    assert bits_of(make_task, recompute) == bits_of(make_task, "none")


def test_a_policy_keeps_less_and_marks_keep_least():
    none, policy, blocks = (
        compiled(mlp_task, how)[0].memory_analysis().temp_size_in_bytes for how in ("none", POLICY, "blocks")
    )
    assert policy < 0.8 * none
    assert blocks < 0.8 * policy


def test_collectives_can_stand_between_marks(strategy):
    def with_mean(variables, batch, key):
        hidden = jnp.tanh(batch @ variables)
        centre = strategies.get_replica_context().all_reduce("mean", hidden.mean(0))
        hidden = recomputation_checkpoint(jnp.tanh(hidden - centre))
        return jnp.mean((hidden @ variables) ** 2)

    batch, variables = jnp.linspace(0, 1, 48).reshape(16, 3), jnp.linspace(-1, 1, 9).reshape(3, 3)

    def gradient(recompute):
        loss_fn = recomputing(with_mean, recompute)
        return strategy.run(lambda v, x: jax.grad(loss_fn)(v, x, None), args=(variables, batch))

    assert [x.tobytes() for x in gradient("blocks").values] == [x.tobytes() for x in gradient("none").values]


@pytest.mark.parametrize("recompute", ["blocks", POLICY])
def test_feeds_can_stand_between_marks(strategy, recompute):
    infeed = strategies.InfeedQueue(np.arange(100, dtype=np.float32))
    outfeed = strategies.OutfeedQueue()

    def loss_fn(variable, batch, key):
        hidden = recomputation_checkpoint(jnp.tanh(batch * variable))
        number = infeed.dequeue()
        outfeed.enqueue((number, hidden.astype(jnp.bfloat16), hidden.mean()))
        return recomputation_checkpoint(jnp.tanh(hidden * variable)).sum() * number

    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1), recompute=recompute, gradient_accumulation_count=2)
    trainer.step(trainer.init(jnp.float32(1)), np.arange(8, dtype=np.float32))
    numbers, hidden, _ = outfeed.dequeue()
    np.testing.assert_array_equal(numbers, np.arange(8).reshape(2, 4))
    np.testing.assert_allclose(hidden[..., 0].T.astype(np.float32), np.tanh(np.arange(8.0)).reshape(4, 2), rtol=0.01)


@pytest.mark.parametrize("recompute", ["block", None, 3])
def test_unknown_policies_are_refused(recompute):
    with pytest.raises(ValueError, match="use 'none', 'blocks', or a policy"):
        recomputing(deep_mlp, recompute)


def test_blocks_without_marks_are_refused():
    with pytest.raises(ValueError, match="has no recomputation_checkpoint"):
        jax.grad(recomputing(lambda x: jnp.sin(x) ** 2, "blocks"))(1.0)


def test_integers_and_unused_results_pass_through():
    def function(x, count):
        counted = recomputation_checkpoint((x * 2, count + 1))
        return jnp.sin(counted[0]) * counted[1], {"count": counted[1]}

    plain, marked = (jax.value_and_grad(recomputing(function, how), has_aux=True) for how in ("none", "blocks"))
    assert jax.tree.map(float, plain(0.5, 3)) == jax.tree.map(float, marked(0.5, 3))
