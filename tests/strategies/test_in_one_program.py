"""Steps of a single replica: one program, with the bits of a step in parts."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import strategies
from strategies.jax.engine import FusedPending

STEPS = 6


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


def trained(num_replicas=1, loss_fn=loss_with_state, **options):
    """Return the end of a training with small batches, and whether each step was one program."""
    trainer = strategies.Trainer(
        strategies.IPUStrategy(num_replicas=num_replicas),
        loss_fn,
        optax.adamw(1e-2),
        model_state_aggregation={"mean": "mean", "count": "first", "sum": "sum"},
        **options,
    )
    begin, are_fused = trainer._engine.begin, []

    def begun(*arguments):
        pending = begin(*arguments)
        are_fused.append(isinstance(pending, FusedPending))
        return pending

    trainer._engine.begin = begun
    rng = np.random.default_rng(0)
    variables = {"kernel": rng.standard_normal((6, 5)).astype(np.float32), "bias": np.ones(5, np.float32)}
    state = trainer.init(variables, {"mean": np.zeros(5, np.float32), "count": np.int32(0), "sum": np.float32(0)})
    for _ in range(STEPS):
        state, metrics = trainer.step(state, rng.standard_normal((4, 6)).astype(np.float32))
    bits = strategies.fingerprint((state.variables, state.optimizer_state, state.model_state))
    return (bits, dict(metrics)), are_fused


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"trainable": lambda name, variable: "bias" not in name}, marks=pytest.mark.complete)],
    ids=["", "frozen"],
)
def test_one_program_has_the_bits_of_the_parts(options):
    in_one, are_fused = trained(**options)
    in_parts, others = trained(**options, check_numerics=True)
    assert in_one == in_parts
    assert are_fused == [True] * STEPS
    assert others == [False] * STEPS


def test_a_loss_function_that_calls_python_keeps_the_step_in_parts(caplog):
    def loss_fn(*arguments):
        jax.debug.callback(lambda: None)
        return loss_with_state(*arguments)

    with caplog.at_level(logging.INFO, "strategies.jax"):
        _, are_fused = trained(loss_fn=loss_fn)
    assert "in parts: the loss function calls back" in caplog.text
    assert are_fused == [False] * STEPS


@pytest.mark.complete
def test_several_replicas_never_try_one_program():
    assert trained(num_replicas=2)[1] == [False] * STEPS
