"""Train a small network for two epochs, and print the results of each instance.

usage: [WIDTH=N] [PARTS=1] [UNTIL=STEP] [BEGUN=FILE] [COMPILE_AHEAD=1 [HURRY=1]] \
    surviving_training.py STEPS_PER_EPOCH [STEPS_BETWEEN_DIGESTS [FOLDER_OF_CHECKPOINTS]]
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies

BATCH_SIZE = 2
LIMIT_S = 120.0
traced_or_compiled: Counter[str] = Counter()  # how often, by the name of the thread, where `count` is registered


@dataclass(frozen=True)
class Training:
    """A training's data, network and checkpoints.

    Attributes:
        steps: The number of steps of each of two epochs.
        digest_every: See `strategies.Trainer`.
        folder: The folder of checkpoints of all steps, used to resume the training; empty: no checkpoints.
        until: The last step; 0: both epochs.
        width: The network's width.
        has_parts: Whether instances have different parts of the state: sharded optimizer state.
    """

    steps: int
    digest_every: int = 0
    folder: str = ""
    until: int = 0
    width: int = 8
    has_parts: bool = False


def count(event: str, _: float, **details: object) -> None:
    """Count JAX's compilation events by thread."""
    if event.startswith("/jax/core/compile/"):
        traced_or_compiled[threading.current_thread().name] += 1


def loss_fn(variables, batch, key):
    hidden = jnp.tanh(batch["x"] @ variables["w"] + variables["b"])
    noise = 0.01 * jax.random.uniform(key, hidden.shape)
    error = (hidden + noise) @ variables["v"] - batch["y"]
    return jnp.mean(error**2), {"hidden": jnp.mean(hidden)}


def train(strategy: strategies.Strategy, training: Training) -> dict[str, Any]:
    """Train, and return the results of this instance."""
    length = training.steps * BATCH_SIZE * strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(length, 16)).astype(np.float32)
    dataset = strategy.distribute_dataset({"x": x, "y": x[:, :1] * 3}, batch_size=BATCH_SIZE, seed=1)
    options: Any = {"digest_every": training.digest_every}
    if training.has_parts:
        options |= {"replicated_optimizer_state_sharding": True}
    trainer = strategies.Trainer(strategy, loss_fn, optax.sgd(0.1, momentum=0.9), **options)
    width = training.width
    w = np.resize(np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32) * 0.1, (16, width))
    state = trainer.init({"w": w, "b": np.zeros(width, np.float32), "v": np.ones((width, 1), np.float32)})
    losses, compiled, me = [], [], threading.current_thread().name
    saved = strategies.Checkpoints(training.folder, trainer, dataset) if training.folder else nullcontext()
    with saved as checkpoints:
        if checkpoints is not None:
            state = checkpoints.restore(state)
        for epoch in range(dataset.position().epoch, 2):
            for batch in dataset.epoch(epoch):
                before = traced_or_compiled[me]
                state, metrics = trainer.step(state, batch)
                compiled.append(traced_or_compiled[me] - before)
                losses.append((metrics["loss"], metrics["hidden"]))
                if os.environ.get("BEGUN"):
                    Path(os.environ["BEGUN"]).touch()
                if checkpoints is not None:
                    checkpoints.after_step(state)
                    checkpoints.wait()  # so that the next checkpoint is not late
                if state.step == training.until:
                    break
            if state.step == training.until:
                break
    found = {"fingerprint": strategies.fingerprint(state.variables), "step": state.step, "losses": losses}
    found |= {"instances": strategy.num_instances, "replicas": len(strategy.local_replicas)}
    return found | {"compiled": compiled, "mechanism": strategy.communicator.mechanism}


def main() -> None:
    jax.monitoring.register_event_duration_secs_listener(count)
    arguments = sys.argv[1:]
    training = Training(
        steps=int(arguments[0]),
        digest_every=int(arguments[1]) if len(arguments) > 1 else 0,
        folder=arguments[2] if len(arguments) > 2 else "",
        until=int(os.environ.get("UNTIL", "0")),
        width=int(os.environ.get("WIDTH", "8")),
        has_parts="PARTS" in os.environ,
    )
    found = train(strategies.PopDistStrategy(), training)
    print(json.dumps(found | {"threads": sorted(traced_or_compiled)}))


if __name__ == "__main__":
    main()
