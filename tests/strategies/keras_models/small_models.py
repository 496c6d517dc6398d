"""Small models and data for tests, the same ones each time."""

import keras
import numpy as np
from keras import layers

import strategies

RNG = np.random.default_rng(5)
ROWS = 52  # no multiple of 16, the rows of a step of four replicas, of which it leaves four
X = RNG.standard_normal((ROWS, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, ROWS)
TARGETS = X @ RNG.standard_normal((6, 1)).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 2, ROWS).astype(np.float32)


class Batches(keras.utils.PyDataset):
    """Batches of so many rows each, by their numbers."""

    def __init__(self, rows=4, count=ROWS // 4, **named):
        super().__init__(**named)
        self.rows, self.count = rows, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        rows = slice(number * self.rows, (number + 1) * self.rows)
        return X[rows], TARGETS[rows]


class AddsLoss(layers.Layer):
    def call(self, values):
        self.add_loss(0.1 * keras.ops.mean(values**2))
        return values


def hooked(hook, function):
    """A callback of the user's own with one method, `function(callback, number, logs)`."""
    return type("Hooked", (keras.callbacks.Callback,), {hook: function})()


def dense(units, seed, **named):
    return layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **named)


def classifier(**compiled):
    """Batch normalisation, dropout and an accuracy."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            dense(5, 1, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=3),
            dense(3, 2, activation="softmax"),
        ]
    )
    named = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"]} | compiled
    model.compile(loss="sparse_categorical_crossentropy", **named)
    return model


def regression(optimizer=None, **compiled):
    """Everything in it is linear, so that it is the same model however rows are spread over replicas."""
    model = keras.Sequential([keras.Input((6,)), dense(4, 1), dense(1, 2)])
    model.compile(optimizer or keras.optimizers.SGD(0.05), **{"loss": "mse"} | compiled)
    return model


def linear(*metrics, optimizer="sgd", **compiled):
    """One layer, the loss "mse"."""
    model = keras.Sequential([keras.Input((6,)), dense(1, 1)])
    model.compile(optimizer, "mse", metrics=list(metrics), **compiled)
    return model


def bits_of(model):
    """Those of all that a model has."""
    values = [np.asarray(variable) for variable in model.variables]
    if model.optimizer is not None:
        values += [np.asarray(variable) for variable in model.optimizer.variables]
    return strategies.fingerprint(values)


def values_of(model):
    return [np.asarray(variable) for variable in model.variables]


def largest_difference(one, other):
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(one, other, strict=True))
