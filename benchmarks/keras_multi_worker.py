"""A worker of `keras_fit.py`: Keras's `fit` on TensorFlow, under its MultiWorkerMirroredStrategy.

usage: keras_multi_worker.py ROUNDS STEPS     (TF_CONFIG names the workers, TF_USE_LEGACY_KERAS=1 has Keras 2)
"""

from __future__ import annotations

import json
import os
import sys

import keras_task
import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]


def main() -> None:
    """Train; the first worker prints the seconds of each epoch."""
    rounds, steps = map(int, sys.argv[1:])
    distribute = tf.distribute.experimental
    ring = distribute.CommunicationOptions(implementation=distribute.CommunicationImplementation.RING)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    rows = strategy.num_replicas_in_sync * keras_task.BATCH_SIZE
    x, y = keras_task.data(rows * steps)
    with strategy.scope():
        model = keras_task.build(tf.keras)
    times = keras_task.timed({"multi_worker": lambda: model.fit(x, y, batch_size=rows, verbose=0)}, rounds)
    if strategy.cluster_resolver.task_id == 0:
        print(json.dumps(times), flush=True)
    sys.stdout.flush()
    os._exit(0)  # at its regular end a worker waits for the others, and complains if they were faster


if __name__ == "__main__":
    main()
