"""Trains a small network for two epochs and prints what every instance has found at the end.

usage: [WIDTH=N] surviving_training.py STEPS_PER_EPOCH [STEPS_BETWEEN_DIGESTS [FOLDER_OF_CHECKPOINTS]]
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies

BATCH_SIZE = 2
WIDTH = int(os.environ.get("WIDTH", "8"))


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["w"] + variables["b"])
    noise = 0.01 * jax.random.normal(key, hidden.shape)
    error = (hidden + noise) @ variables["v"] - batch["y"]
    return jnp.mean(error**2), {"hidden": jnp.mean(hidden)}


def main() -> None:
    strategy = strategies.PopDistStrategy()
    digest_every = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    length = int(sys.argv[1]) * BATCH_SIZE * strategy.num_replicas_in_sync
    random = np.random.default_rng(0)
    x = random.normal(size=(length, 16)).astype(np.float32)
    dataset = strategy.distribute_dataset({"x": x, "y": x[:, :1] * 3}, batch_size=BATCH_SIZE, seed=1)
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-2), digest_every=digest_every)
    w = np.resize(x[:16, :8] * 0.1, (16, WIDTH))
    state = trainer.init({"w": w, "b": np.zeros(WIDTH, np.float32), "v": np.ones((WIDTH, 1), np.float32)})
    losses = []
    with strategies.Checkpoints(sys.argv[3], trainer) if len(sys.argv) > 3 else nullcontext() as checkpoints:
        for epoch in range(2):
            for batch in dataset.epoch(epoch):
                state, metrics = trainer.step(state, batch)
                losses.append((metrics["loss"], metrics["hidden"]))
                if checkpoints is not None:
                    checkpoints.after_step(state)
    found = {"fingerprint": strategies.fingerprint(state.variables), "step": state.step, "losses": losses}
    found |= {"instances": strategy.num_instances, "replicas": len(strategy.local_replicas)}
    print(json.dumps(found | {"mechanism": strategy.communicator.mechanism}))


if __name__ == "__main__":
    main()
