"""Weights of losses whose replicas compute with each other's rows: gradients have parts of the losses of others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies

REPLICAS, ROWS = 4, 3
DRAW = np.random.default_rng(5)
X = DRAW.standard_normal((REPLICAS, ROWS, 6)).astype(np.float32)
WEIGHTS = np.float32([1, 5, 0, 3])
VARIABLES = {"w": DRAW.standard_normal(6).astype(np.float32)}


def of_rows(hidden, mean):
    return jnp.square(hidden * mean - 1).mean()


def loss_fn(variables, batch, key):
    hidden = batch["x"] @ variables["w"]
    mean = strategies.get_replica_context().all_reduce("mean", hidden.mean())
    return strategies.Outcome(of_rows(hidden, mean), weight=batch["weight"][0])


def stepped(strategy, loss_fn=loss_fn, **options):
    local = strategy.local_replicas
    rows = slice(local.start, local.stop)
    batch = {"x": X[rows].reshape(-1, 6), "weight": np.repeat(WEIGHTS[rows].astype(np.int32), ROWS)}
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(1.0), **options)
    state, metrics = trainer.step(trainer.init(VARIABLES), batch)
    return np.asarray(state.variables["w"]), metrics["loss"]


def test_gradients_through_collectives_are_those_of_the_weighted_mean(on_instances):
    def weighted_mean(variables):
        hidden = X @ variables["w"]
        losses = jax.vmap(of_rows, (0, None))(hidden, hidden.mean())
        return (losses * WEIGHTS).sum() / WEIGHTS.sum()

    found = [each for instances in (1, 2, 4) for each in on_instances(instances, REPLICAS, stepped)]
    loss, gradients = jax.value_and_grad(weighted_mean)(VARIABLES)
    for variables, own in found:
        assert variables.tobytes() == found[0][0].tobytes()
        np.testing.assert_allclose(variables, VARIABLES["w"] - gradients["w"], rtol=1e-5)
        assert own == pytest.approx(float(loss), rel=1e-5)


def test_a_loss_of_weight_0_that_is_not_finite_is_an_error_on_all_instances(on_instances):
    """Its gradients would be NaN, and the loss of the step finite."""

    def of_no_rows(variables, batch, key):
        outcome = loss_fn(variables, batch, key)
        return strategies.Outcome(outcome.loss * outcome.weight / outcome.weight, weight=outcome.weight)

    def refused(strategy):
        with pytest.raises(strategies.WeightError, match=r"divide a sum by jnp.maximum\(tokens, 1\)"):
            stepped(strategy, of_no_rows)

    on_instances(2, REPLICAS, refused)


WIDE = {"a": DRAW.standard_normal((64, 128)) / 8, "b": DRAW.standard_normal((128, 128)) / 8, "c": np.ones(128) / 128}
WIDE = {name: array.astype(np.float32) for name, array in WIDE.items()}


def with_dropout(variables, batch, key):
    """Return a loss with a collective behind computations that take XLA long, so that it makes several at once."""
    hidden = jax.nn.relu(jax.nn.gelu(batch["x"] @ variables["a"]) @ variables["b"])
    loss = jnp.square((hidden * jax.random.bernoulli(key, 0.9, hidden.shape)) @ variables["c"]).mean()
    return loss * strategies.get_replica_context().all_reduce("mean", loss)


def test_replicas_meet_in_the_same_micro_batch(strategy):
    """Otherwise results differ from time to time, or a replica waits for ever."""
    batch = {"x": DRAW.standard_normal((REPLICAS * 15, 64)).astype(np.float32)}
    options = {"gradient_accumulation_count": 3, "reduction_method": "sum"}
    trainer = strategies.Trainer(strategy, with_dropout, optax.sgd(1.0), **options)
    found = [trainer.step(trainer.init(WIDE), batch) for _ in range(40)]
    assert len({strategies.fingerprint(state.variables) for state, _ in found}) == 1
    assert len({metrics["loss"] for _, metrics in found}) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"map_gradient": lambda gradient, variable: gradient}, "map_gradient would get gradients"),
        ({"compute_dtype": "float16"}, "overflow in float16"),
    ],
)
def test_options_that_weights_would_spoil_are_refused(on_instances, options, text):
    def refused(strategy):
        with pytest.raises(ValueError, match=text):
            stepped(strategy, **options)

    on_instances(1, REPLICAS, refused)
