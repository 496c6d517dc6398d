"""A worker of `train_step.py` with TensorFlow: MultiWorkerMirroredStrategy with RING over gRPC, on the same models.

usage: training_tensorflow.py SOCKET MODEL BATCH_SIZE RANK RANKS     (TF_CONFIG names the workers)
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import control
import tensorflow as tf  # type: ignore[import-untyped,unused-ignore]
import training_task

Variables = dict[str, dict[str, Any]]


def main() -> None:
    path, model, batch_size, rank, ranks = sys.argv[1:]
    peer = Peer(model, int(batch_size), int(rank), int(ranks))
    control.serve(path, "tensorflow", int(rank), {"tensorflow": peer.run})
    sys.stdout.flush()
    os._exit(0)  # a regular exit waits for the other workers, and reports an error if they ended first


class Peer:
    """Training steps with one replica per process, on batches that are tensors."""

    def __init__(self, model: str, batch_size: int, rank: int, ranks: int) -> None:
        distribute = tf.distribute.experimental
        ring = distribute.CommunicationOptions(implementation=distribute.CommunicationImplementation.RING)
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
        self._apply = MODELS[model]
        with self._strategy.scope():
            self._variables: Variables = {
                name: {role: tf.Variable(array) for role, array in layer.items()}
                for name, layer in training_task.first_variables(model).items()
            }
            # Measured: this Adam, a fused kernel per variable, is never slower than Keras's, and 10 % faster on the
            # MLP. XLA (jit_compile) for the gradients makes the CNN three times slower, and the MLP no faster.
            self._optimizer = tf.compat.v1.train.AdamOptimizer(training_task.LEARNING_RATE)
        self._step = tf.function(lambda *batch: self._strategy.run(self._update, args=batch))
        batches = training_task.batches_of(rank, batch_size, ranks)
        tensors = [(tf.constant(batch["image"]), tf.constant(batch["label"])) for batch in batches]
        self._batches = itertools.cycle(tensors)

    def run(self, steps: int) -> dict[str, Any]:
        """Make steps on batches that are tensors."""
        began = time.perf_counter()
        losses = [self._step(*batch) for batch in itertools.islice(self._batches, steps)]
        losses[-1].numpy()
        return {"seconds": time.perf_counter() - began, "losses": [float(loss) for loss in losses]}

    def _update(self, images: Any, labels: Any) -> Any:
        variables = [variable for layer in self._variables.values() for variable in layer.values()]
        with tf.GradientTape() as tape:
            logits = self._apply(self._variables, images)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            share = loss / self._strategy.num_replicas_in_sync  # apply_gradients adds the replicas' gradients
        self._optimizer.apply_gradients(zip(tape.gradient(share, variables), variables, strict=True))
        return loss


def apply_cnn(variables: Variables, images: Any) -> Any:
    features = tf.nn.conv2d(images, variables["conv"]["kernel"], 1, "VALID") + variables["conv"]["bias"]
    features = tf.nn.max_pool2d(tf.nn.relu(features), 2, 2, "VALID")
    hidden = tf.nn.relu(_dense(variables["hidden"], _flatten(features)))
    return _dense(variables["logits"], hidden)


def apply_mlp(variables: Variables, images: Any) -> Any:
    hidden = tf.nn.relu(_dense(variables["hidden1"], _flatten(images)))
    hidden = tf.nn.relu(_dense(variables["hidden2"], hidden))
    return _dense(variables["logits"], hidden)


def _dense(layer: dict[str, Any], inputs: Any) -> Any:
    return inputs @ layer["kernel"] + layer["bias"]


def _flatten(images: Any) -> Any:
    return tf.reshape(images, [images.shape[0], -1])


MODELS = {"cnn": apply_cnn, "mlp": apply_mlp}


if __name__ == "__main__":
    main()
