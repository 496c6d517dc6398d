"""Small models and data for tests, the same each time."""

import keras
import numpy as np
from keras import layers

import strategies

RNG = np.random.default_rng(5)
ROWS = 52  # no multiple of 16, the rows of a step of four replicas: four rows are left over
X = RNG.standard_normal((ROWS, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, ROWS)
TARGETS = X @ RNG.standard_normal((6, 1)).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 2, ROWS).astype(np.float32)


class Batches(keras.utils.PyDataset):
    """An indexed source of batches with `rows` rows each."""

    def __init__(self, rows=4, count=ROWS // 4, **named):
        super().__init__(**named)
        self.rows, self.count = rows, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        rows = slice(number * self.rows, (number + 1) * self.rows)
        return X[rows], TARGETS[rows]


class Reordered(Batches):
    """A source that draws another order at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(self.count)

    def __getitem__(self, number):
        return super().__getitem__(self.order[number])

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class AddsLoss(layers.Layer):
    def call(self, values):
        self.add_loss(0.1 * keras.ops.mean(values**2))
        return values


def hooked(hook, function):
    """Make a callback of the user's own with one method, `function(callback, number, logs)`."""
    return type("Hooked", (keras.callbacks.Callback,), {hook: function})()


def dense(units, seed, **named):
    return layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **named)


def classifier(**compiled):
    """Make a classifier with batch normalisation, dropout and an accuracy."""
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
    """Make a linear regression, which is the same model for every spread of rows over replicas."""
    model = keras.Sequential([keras.Input((6,)), dense(4, 1), dense(1, 2)])
    model.compile(optimizer or keras.optimizers.SGD(0.05), **{"loss": "mse"} | compiled)
    return model


def linear(*metrics, optimizer="sgd", **compiled):
    """Make one layer with the loss "mse"."""
    model = keras.Sequential([keras.Input((6,)), dense(1, 1)])
    model.compile(optimizer, "mse", metrics=list(metrics), **compiled)
    return model


def bits_of(model):
    """Return a fingerprint of all variables of the model and its optimizer."""
    values = [np.asarray(variable) for variable in model.variables]
    if model.optimizer is not None:
        values += [np.asarray(variable) for variable in model.optimizer.variables]
    return strategies.fingerprint(values)


def values_of(model):
    return [np.asarray(variable) for variable in model.variables]


def largest_difference(one, other):
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(one, other, strict=True))
