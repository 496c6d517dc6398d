"""Train a small Keras model, and print the results of each instance.

usage: keras_training.py [FOLDER OF BACKUPS | FOLDER.checkpoints]
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers

import popdist
import strategies
import strategies.keras


def train(strategy: strategies.Strategy, folder: str = "") -> dict[str, object]:
    """Return the fingerprint and the last metrics of this instance."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((70, 8)).astype(np.float32), rng.integers(0, 3, 70)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3, seed=3),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        callbacks = [keras.callbacks.BackupAndRestore(folder)] if folder else []
        if folder.endswith(".checkpoints"):
            callbacks = [strategies.keras.Checkpoints(folder, every=2)]
        held_out = (x[:21], y[:21])
        history = model.fit(x, y, batch_size=4, epochs=3, verbose=0, validation_data=held_out, callbacks=callbacks)
    return {
        "variables": strategies.fingerprint([np.asarray(variable) for variable in model.variables]),
        "last": {name: values[-1] for name, values in history.history.items()},
    }


if __name__ == "__main__":
    popdist.init()
    print(json.dumps(train(strategies.PopDistStrategy(), *sys.argv[1:])))
