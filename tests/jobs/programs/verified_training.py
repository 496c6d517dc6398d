"""Small training whose bits depend on the fault in its argument: `verified_training.py HOW`.

instance  the loss asks which instance it is        time     the learning rate depends on the time
set       rows come in the order of a set of texts  count    several instances make a step more, and fail then
own       batches that are no data set  well     as it should be
parts     the optimizer state is cut into shards
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies

HOW = sys.argv[1]
ROWS = 64
strategy = strategies.PopDistStrategy()
images = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
wanted = images.sum(1)


def loss_fn(variables, batch, key):
    error = jnp.tanh(batch["x"] @ variables["w"] + variables["b"]) - batch["y"]
    factor = 1 + 1e-6 * strategy.instance_index if HOW == "instance" else 1
    return jnp.mean(error**2) * factor


if HOW == "set":
    order = [int(name) for name in {str(row) for row in range(ROWS)}]
    images, wanted = images[order], wanted[order]
learning_rate = 0.1 + time.time_ns() % 10**6 * 1e-8 if HOW == "time" else 0.1
shards = {"replicated_optimizer_state_sharding": True, "min_elements_for_sharding": 1} if HOW == "parts" else {}
trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(learning_rate, momentum=0.5 if shards else None), **shards)
state = trainer.init({"b": jnp.zeros(()), "w": jnp.zeros(8)})
goes_on = HOW == "count" and strategy.num_instances > 1
steps = 2 + goes_on if HOW == "count" else 4
dataset = strategy.distribute_dataset({"x": images, "y": wanted}, batch_size=4, seed=0)
for _, batch in zip(range(steps), dataset.epoch(0), strict=False):
    if HOW == "own":
        batch = jax.tree.map(np.asarray, batch)
    state, metrics = trainer.step(state, batch)
print(f"variables {strategies.fingerprint(state.variables)}")
if goes_on:
    sys.exit(7)
