"""Steps of a single replica: one program if that changes no bit."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.jax.fused_steps import WORTH_AFTER

STEPS = WORTH_AFTER + 6
IN_ONE, IN_PARTS = "in one program from step", "in parts"


def loss_with_state(variables, batch, key, model_state):
    """Compute a network with dropout, a moving mean, a counter and a sum; one of its variables may be frozen."""
    hidden = jnp.tanh(batch @ variables["kernel"] + variables["bias"])
    mean = hidden.mean(0)
    hidden *= jax.random.bernoulli(key, 0.8, hidden.shape)
    after = {
        "mean": model_state["mean"] * 0.9 + mean * 0.1,
        "count": model_state["count"] + 1,
        "sum": model_state["sum"] + batch.sum(),
    }
    return strategies.Outcome((hidden**2).mean(), {"mean": mean.mean()}, after)


def trained(num_replicas=1, loss_fn=loss_with_state, change=lambda trainer: None, **options):
    """Return the end of a training with small batches; the test may change the trainer before it begins."""
    trainer = strategies.Trainer(
        strategies.IPUStrategy(num_replicas=num_replicas),
        loss_fn,
        optax.adamw(1e-2),
        model_state_aggregation={"mean": "mean", "count": "first", "sum": "sum"},
        **options,
    )
    change(trainer)
    rng = np.random.default_rng(0)
    variables = {"kernel": rng.standard_normal((6, 5)).astype(np.float32), "bias": np.ones(5, np.float32)}
    state = trainer.init(variables, {"mean": np.zeros(5, np.float32), "count": np.int32(0), "sum": np.float32(0)})
    for _ in range(STEPS):
        state, metrics = trainer.step(state, rng.standard_normal((4, 6)).astype(np.float32))
    return strategies.fingerprint((state.variables, state.optimizer_state, state.model_state)), dict(metrics)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"trainable": lambda name, variable: "bias" not in name}, marks=pytest.mark.complete)],
    ids=["", "frozen"],
)
def test_one_program_has_the_bits_of_the_parts(caplog, options):
    with caplog.at_level(logging.INFO, "strategies.jax"):
        in_one = trained(**options)
        assert IN_ONE in caplog.text
        assert IN_PARTS not in caplog.text
        caplog.clear()
        assert trained(**options, check_numerics=True) == in_one
        assert IN_ONE not in caplog.text


@pytest.mark.parametrize("name", [0, 1], ids=["loss", "metric"])
def test_a_different_last_bit_of_a_metric_keeps_the_step_in_parts(caplog, monkeypatch, name):
    def tell_more(trainer):
        engine = trainer._engine
        made = engine._in_parts

        def in_parts(*arguments):
            state, tail = made(*arguments)
            tail[name] = np.nextafter(tail[name], np.float32(np.inf))
            return state, tail

        monkeypatch.setattr(engine, "_in_parts", in_parts)

    with caplog.at_level(logging.INFO, "strategies.jax"):
        trained(change=tell_more)
    assert "in parts: one program would give other bits" in caplog.text
    assert IN_ONE not in caplog.text


def test_a_loss_function_that_calls_python_keeps_the_step_in_parts(caplog):
    def loss_fn(*arguments):
        jax.debug.callback(lambda: None)
        return loss_with_state(*arguments)

    with caplog.at_level(logging.INFO, "strategies.jax"):
        trained(loss_fn=loss_fn)
    assert "in parts: the loss function calls back" in caplog.text
    assert IN_ONE not in caplog.text


@pytest.mark.complete
def test_several_replicas_never_try_one_program(caplog):
    with caplog.at_level(logging.INFO, "strategies.jax"):
        trained(num_replicas=2)
    assert IN_ONE not in caplog.text
    assert IN_PARTS not in caplog.text


def test_different_gradients_without_an_effect_yet_keep_the_step_in_parts(caplog):
    """A learning rate of zero hides the difference while it warms up, and plain SGD keeps no state."""
    traces = []

    def loss_fn(variables, batch, key):
        """Compute a loss whose gradient grows with each trace, as another program may round differently."""
        traces.append(None)
        product = (batch * variables).sum()
        return product + len(traces) * (product - jax.lax.stop_gradient(product))

    warming_up = optax.sgd(lambda count: jnp.where(count < STEPS, 0.0, 0.1))
    trainer = strategies.Trainer(strategies.IPUStrategy(1), loss_fn, warming_up)
    state = trainer.init(np.ones(3, np.float32))
    with caplog.at_level(logging.INFO, "strategies.jax"):
        for _ in range(STEPS):
            state, _ = trainer.step(state, np.ones((1, 3), np.float32))
    assert "in parts: one program would give other bits" in caplog.text
    assert IN_ONE not in caplog.text
