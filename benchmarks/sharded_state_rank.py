"""An instance of `sharded_state.py`, which trains a wide MLP with Adam and prints the memory that this takes.

usage: sharded_state_rank.py WIDTH BATCH_SIZE STEPS [--sharded]
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import jax
import numpy as np
import optax
from resident_memory import peak_bytes, reset_peak, resident_bytes

import strategies

HIDDEN_LAYERS = 4
CLASSES = 10
WARM_UP_STEPS = 2  # the first step compiles, which takes memory of its own

Layers = list[dict[str, Any]]


def main() -> None:
    width, batch_size, steps = map(int, sys.argv[1:4])
    strategy = strategies.PopDistStrategy()
    before = resident_bytes()
    trainer = strategies.Trainer(
        strategy, loss_fn, optax.adam(1e-3), replicated_optimizer_state_sharding=sys.argv[4:] == ["--sharded"]
    )
    state = trainer.init(first_variables(width))
    batch = batch_of(strategy.instance_index, batch_size, width)
    times_s = []
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            reset_peak()
        began = time.perf_counter()
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.variables)
        times_s.append(time.perf_counter() - began)
    own = np.array([state_bytes(state), before, peak_bytes()])
    of_all = strategy.communicator.all_gather(own, name="bytes of all instances")
    if strategy.instance_index == 0:
        names = ("state_bytes", "bytes_before", "peak_bytes")
        figures = dict(zip(names, of_all.max(axis=0).tolist(), strict=True))
        ms = 1e3 * median(times_s[WARM_UP_STEPS:])
        print(json.dumps({**figures, "ms_per_step": ms, "variables_sha256": strategies.fingerprint(state.variables)}))


def state_bytes(state: strategies.TrainState) -> int:
    """Return the bytes of this instance's optimizer state in XLA's buffers."""
    shards = (shard for leaf in jax.tree.leaves(state.optimizer_state) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards)


def first_variables(width: int) -> Layers:
    """Return hidden layers, `[width, width]` each, and the last layer."""
    random = np.random.default_rng(0)
    return [
        {
            "kernel": (2 / width) ** 0.5 * random.standard_normal((width, columns), np.float32),
            "bias": np.zeros(columns, np.float32),
        }
        for columns in (*[width] * HIDDEN_LAYERS, CLASSES)
    ]


def batch_of(instance: int, batch_size: int, width: int) -> dict[str, np.ndarray]:
    """Return a batch of random rows."""
    random = np.random.default_rng([1, instance])
    labels = random.integers(0, CLASSES, batch_size).astype(np.int32)
    return {"x": random.random((batch_size, width), np.float32), "label": labels}


def loss_fn(variables: Layers, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    hidden = batch["x"]
    for layer in variables[:-1]:
        hidden = jax.nn.relu(hidden @ layer["kernel"] + layer["bias"])
    logits = hidden @ variables[-1]["kernel"] + variables[-1]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


if __name__ == "__main__":
    main()
