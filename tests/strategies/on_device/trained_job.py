"""An instance of a job that trains twice, by compiled collectives and on the host, and prints both fingerprints."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import popdist
import strategies
from strategies.defaults import Defaults

STEPS = 4
ROWS = 3
WIDE = 33_000  # one leaf has its own buffer


def main(folder: str) -> None:
    replicas = popdist.getNumTotalReplicas()
    draw = np.random.default_rng(0)
    features = draw.standard_normal((STEPS * ROWS * replicas, 8)).astype(np.float32)
    labels = draw.integers(0, 3, len(features))
    first = {
        "hidden": draw.standard_normal((8, WIDE)).astype(np.float32),
        "narrow": draw.standard_normal((WIDE, 3)).astype(jnp.bfloat16),
    }
    for exchange in ("compiled", "host"):
        strategy = strategies.PopDistStrategy(defaults=Defaults(exchange=exchange))
        dataset = strategy.distribute_dataset({"x": features, "y": labels}, batch_size=ROWS, seed=0)
        trainer = strategies.Trainer(strategy, loss, optax.adam(1e-2))
        state = trainer.init(first)
        with strategies.Checkpoints(f"{folder}/{exchange}", trainer, dataset) as checkpoints:
            for batch in dataset.epoch(0):
                state, metrics = trainer.step(state, batch)
            checkpoints.save(state)
        found = [strategies.fingerprint(each.variables) for each in (state, checkpoints.restore(trainer.init(first)))]
        print(strategy.replicas.exchange.path_name, *found, np.float32(metrics["loss"]).tobytes().hex(), flush=True)


def loss(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["hidden"])
    logits = (hidden.astype(jnp.bfloat16) @ variables["narrow"]).astype(jnp.float32)
    logits += 0.1 * jax.random.normal(key, logits.shape)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {}


if __name__ == "__main__":
    main(sys.argv[1])
