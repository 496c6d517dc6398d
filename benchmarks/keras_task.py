"""The model, data and timed epochs of `keras_fit.py`, for all of its processes.

Run as a program, this is a worker with Keras's `fit` on TensorFlow, under MultiWorkerMirroredStrategy.

usage: keras_task.py ROUNDS STEPS     (TF_CONFIG names the workers, TF_USE_LEGACY_KERAS=1 selects Keras 2)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH_SIZE = 64
CPU = "_cpu"
NOT_COUNTED = 3  # a step of one replica is compiled again after 32 steps


def build(keras: Any) -> Any:
    """Build and compile the model."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((784,)), *(layers.Dense(1024, activation="relu") for _ in range(2)), layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def data(rows: int) -> tuple[Any, Any]:
    """Return images and labels."""
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 784)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)


def timed(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds and CPU seconds of each way in each round, in turns, without the first rounds."""
    times: dict[str, list[float]] = {name + kind: [] for name in ways for kind in ("", CPU)}
    for _ in range(rounds + NOT_COUNTED):
        for name, way in ways.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            way()
            times[name].append(time.perf_counter() - start)
            times[name + CPU].append(time.process_time() - start_cpu)
    return {name: each[NOT_COUNTED:] for name, each in times.items()}


def main() -> None:
    """Train; the first worker prints the seconds of each epoch."""
    import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]

    rounds, steps = map(int, sys.argv[1:])
    distribute = tf.distribute.experimental
    ring = distribute.CommunicationOptions(implementation=distribute.CommunicationImplementation.RING)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    rows = strategy.num_replicas_in_sync * BATCH_SIZE
    x, y = data(rows * steps)
    with strategy.scope():
        model = build(tf.keras)
    times = timed({"multi_worker": lambda: model.fit(x, y, batch_size=rows, verbose=0)}, rounds)
    if strategy.cluster_resolver.task_id == 0:
        print(json.dumps(times), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a regular exit waits for the other workers, and reports an error if they ended first


if __name__ == "__main__":
    main()
