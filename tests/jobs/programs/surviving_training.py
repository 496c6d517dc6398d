"""Trains a small network for two epochs and prints what every instance has found at the end.

usage: [WIDTH=N] [COMPILE_AHEAD=1 [HURRY=1]] \
    surviving_training.py STEPS_PER_EPOCH [STEPS_BETWEEN_DIGESTS [FOLDER_OF_CHECKPOINTS]]
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies

BATCH_SIZE = 2
WIDTH = int(os.environ.get("WIDTH", "8"))
LIMIT_S = 120.0
traced_or_compiled = {"MainThread": 0}  # how often, by the name of the thread


def count(event: str, _: float, **details: object) -> None:
    if event.startswith("/jax/core/compile/"):
        name = threading.current_thread().name
        traced_or_compiled[name] = traced_or_compiled.get(name, 0) + 1


def wait_for_the_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "compile-ahead":
            thread.join(LIMIT_S)


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["w"] + variables["b"])
    noise = 0.01 * jax.random.normal(key, hidden.shape)
    error = (hidden + noise) @ variables["v"] - batch["y"]
    return jnp.mean(error**2), {"hidden": jnp.mean(hidden)}


def main() -> None:
    jax.monitoring.register_event_duration_secs_listener(count)
    strategy = strategies.PopDistStrategy()
    digest_every = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    length = int(sys.argv[1]) * BATCH_SIZE * strategy.num_replicas_in_sync
    random = np.random.default_rng(0)
    x = random.normal(size=(length, 16)).astype(np.float32)
    dataset = strategy.distribute_dataset({"x": x, "y": x[:, :1] * 3}, batch_size=BATCH_SIZE, seed=1)
    options = {"digest_every": digest_every, "compile_ahead": "COMPILE_AHEAD" in os.environ}
    trainer = strategies.Trainer(strategy, loss_fn, optax.adam(1e-2), **options)
    w = np.resize(x[:16, :8] * 0.1, (16, WIDTH))
    state = trainer.init({"w": w, "b": np.zeros(WIDTH, np.float32), "v": np.ones((WIDTH, 1), np.float32)})
    losses, compiled = [], []
    with strategies.Checkpoints(sys.argv[3], trainer) if len(sys.argv) > 3 else nullcontext() as checkpoints:
        for epoch in range(2):
            for batch in dataset.epoch(epoch):
                if "HURRY" not in os.environ:
                    wait_for_the_background()
                before = traced_or_compiled["MainThread"]
                state, metrics = trainer.step(state, batch)
                compiled.append(traced_or_compiled["MainThread"] - before)
                losses.append((metrics["loss"], metrics["hidden"]))
                if checkpoints is not None:
                    checkpoints.after_step(state)
    found = {"fingerprint": strategies.fingerprint(state.variables), "step": state.step, "losses": losses}
    found |= {"instances": strategy.num_instances, "replicas": len(strategy.local_replicas)}
    found |= {"compiled": compiled, "threads": sorted(traced_or_compiled)}
    print(json.dumps(found | {"mechanism": strategy.communicator.mechanism}))


if __name__ == "__main__":
    main()
