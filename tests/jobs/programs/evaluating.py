"""Trains, evaluates and predicts, and prints what every instance has found after each step.

usage: evaluating.py REPLICAS
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies

ROWS = 63
STEPS = 4


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["w"])
    noise = 0.01 * jax.random.normal(key, hidden.shape)
    score = (hidden + noise) @ variables["v"]
    return strategies.Outcome(jnp.mean((score - batch["y"]) ** 2), {"score": score.mean()}, outputs=score)


def metrics_fn(variables, batch, mask, key):
    return {"loss": strategies.Mean.of((loss_fn(variables, batch, key).outputs - batch["y"]) ** 2, mask)}


def work(strategy: strategies.Strategy) -> Iterator[dict[str, Any]]:
    """What an instance has found after each step."""
    x = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
    data = {"x": x, "y": x[:, 0] * 3}
    training = strategy.distribute_dataset(data, 2)
    testing = strategy.distribute_dataset(data, 3, shuffle=False, remainder="pad")
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(1e-2, momentum=0.9))
    w = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    state = trainer.init({"w": w, "v": np.ones(8, np.float32)})
    for batch, _ in zip(training.epoch(0), range(STEPS), strict=False):
        state, metrics = trainer.step(state, batch)
        outputs = np.concatenate(list(trainer.predict(state, testing)))
        yield {
            "loss": metrics["loss"],
            "rows": len(outputs),
            "outputs": hashlib.sha256(outputs.tobytes()).hexdigest(),
            "evaluation": dict(trainer.evaluate(state, testing)),
            "by batch": dict(trainer.evaluate(state, testing, metrics_fn=metrics_fn)),
        }


def main() -> None:
    popdist.init(int(sys.argv[1]))
    strategy = strategies.PopDistStrategy()
    for found in work(strategy):
        print(json.dumps([strategy.num_instances, found]), flush=True)


if __name__ == "__main__":
    main()
