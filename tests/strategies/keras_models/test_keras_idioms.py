# ruff: noqa: E501 - each idiom is one row
"""Idioms of Keras programs, one row each: compared with stock Keras on one replica, and over instances on four.

A row is a model and its use. One replica has the values of stock Keras up to rounding, since the update is a program of its own.
Four replicas have the same bits on one and two instances. If replicas cannot support an idiom, it is refused, and the row gives
the message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import small_models
from keras import layers, ops, optimizers
from keras.callbacks import EarlyStopping, LambdaCallback, LearningRateScheduler, ReduceLROnPlateau
from small_models import Batches
from test_keras_own_steps import OfTheGuide

ROWS = 32  # two steps of four replicas
LABELS, TARGETS, WEIGHTS, X = (
    of[:ROWS] for of in (small_models.LABELS, small_models.TARGETS, small_models.WEIGHTS, small_models.X)
)
RNG = np.random.default_rng(8)
TOKENS = RNG.integers(0, 7, (len(X), 5))
IMAGES = RNG.standard_normal((len(X), 4, 4, 2)).astype(np.float32)
SERIES = RNG.standard_normal((len(X), 4, 3)).astype(np.float32)
FIT = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}


@dataclass(frozen=True)
class Idiom:
    """A model with data and the calls of a program.

    Attributes:
        model: Makes the model, which is not compiled.
        data: The training data.
        compiled: Makes the arguments of `compile` anew; the defaults are "mse" and SGD.
        fit: Makes the arguments of `fit` anew.
        use: The function that uses the compiled model; None for `fit`.
        tolerance: Tolerance of values on one replica, relative to the largest.
        refused: The beginning of the error message.
    """

    model: Callable[[], Any]
    data: tuple[Any, ...] = (X, TARGETS)
    compiled: Callable[[], dict[str, Any]] = dict
    fit: Callable[[], dict[str, Any]] = dict
    use: Callable[[Any, "Idiom"], Any] | None = None
    tolerance: float = 1e-5
    refused: str = ""

    def run(self):
        """Return the values of all variables, and the reported values."""
        model = self.model()
        set_weights(model)
        self.compile(model)
        told = self.train(model) if self.use is None else self.use(model, self)
        values = [np.asarray(one) for one in [*model.variables, *model.optimizer.variables]]
        return [*values, np.array(told, np.float64)]

    def compile(self, model):
        model.compile(**{"optimizer": optimizers.SGD(0.05), "loss": "mse"} | self.compiled())

    def train(self, model, **named):
        history = model.fit(*self.data, **FIT | self.fit() | named).history
        return [value for name in sorted(history) for value in history[name]]


def set_weights(model):
    drawn = np.random.default_rng(1)
    for weight in model.trainable_variables:
        weight.assign(0.3 * drawn.standard_normal(weight.shape))


def mlp(*hidden, units=1, **named):
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), *hidden, layers.Dense(units, **named)])


def classes():
    return mlp(units=3, activation="softmax")


def two_outputs():
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, "tanh")(inputs)
    made = {"value": layers.Dense(1, name="value")(hidden), "kind": layers.Dense(3, name="kind")(hidden)}
    return keras.Model(inputs, made)


def two_inputs():
    inputs = {"rows": keras.Input((6,), name="rows"), "series": keras.Input((4, 3), name="series")}
    joined = layers.Concatenate()([inputs["rows"], layers.Flatten()(inputs["series"])])
    return keras.Model(inputs, layers.Dense(1)(joined))


def normalised():
    model = mlp(layers.SpectralNormalization(layers.Dense(4)))
    model.layers[1].vector_u.assign(np.full(model.layers[1].vector_u.shape, 0.5))
    return model


def attention():
    inputs = keras.Input((4, 3))
    attended = layers.MultiHeadAttention(2, 2, dropout=0.2, seed=4)(inputs, inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.LayerNormalization()(attended + inputs))))


class WithPenalty(keras.Model):
    """A subclassed model with its own loss, a counter, and a moving mean that `call` writes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(4), layers.Dense(1)
        self.mean = self.add_weight(shape=(6,), initializer="zeros", trainable=False)
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
        self(X[:1])

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, 0))
            self.calls.assign_add(1)
        hidden = self.first(x - self.mean)
        self.add_loss(0.01 * ops.mean(hidden**2))
        return self.last(ops.relu(hidden))


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) + 0.1 * ops.mean(y_pred**2)


class OwnTestStep(keras.Sequential):
    def test_step(self, state, data):
        return super().test_step(state, data)


def rebuilt(kind):
    return lambda: kind([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)])


def frozen_between(model, idiom):
    told = idiom.train(model)
    model.layers[0].trainable = False
    idiom.compile(model)
    return told + idiom.train(model)


def thawed_between(model, idiom):
    model.layers[0].trainable = False
    idiom.compile(model)
    told = idiom.train(model)
    model.layers[0].trainable = True
    idiom.compile(model)
    return told + idiom.train(model)


def written_between(model, idiom):
    told = idiom.train(model)
    model.layers[0].set_weights([weight * 0.5 for weight in model.layers[0].get_weights()])
    model.optimizer.learning_rate = 0.01
    return told + idiom.train(model, initial_epoch=1, epochs=3)


def in_batches(model, idiom):
    told = []
    for first in (0, 8, 16):
        told += model.train_on_batch(X[first : first + 8], TARGETS[first : first + 8])
    return told + model.test_on_batch(X[:8], TARGETS[:8]) + model.predict_on_batch(X[:4])[:, 0].tolist()


def asked(model, idiom):
    evaluated = model.evaluate(*idiom.data, batch_size=4, verbose=0, return_dict=True)
    return (
        idiom.train(model)
        + list(evaluated.values())
        + model.predict(idiom.data[0], batch_size=4, verbose=0)[:, 0].tolist()
    )


def with_lora(model, idiom):
    model.layers[0].enable_lora(2)
    set_weights(model)
    idiom.compile(model)
    return idiom.train(model)


def with_generator(model, idiom):
    batches = (Batches()[number % 8] for number in range(24))
    return list(model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0, shuffle=False).history["loss"])


def callbacks(*makes):
    return lambda: {"callbacks": [make() for make in makes], "epochs": 3}


def halved(epoch, rate):
    return rate / 2


SGD, ADAM = optimizers.SGD, optimizers.Adam
KINDS = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy"}
WEAK = keras.regularizers.L2(0.01)
BOTH = {"value": TARGETS, "kind": LABELS}
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IDIOMS = {
    # ---- optimizers
    "adam": Idiom(mlp, compiled=lambda: {"optimizer": ADAM(0.01)}, use=asked),
    "momentum": Idiom(mlp, compiled=lambda: {"optimizer": SGD(0.05, momentum=0.9, nesterov=True)}),
    "schedule": Idiom(mlp, compiled=lambda: {"optimizer": SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))}),
    "schedule in executions": Idiom(mlp, compiled=lambda: {"optimizer": SGD(optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.01])), "steps_per_execution": 3}),
    "warm-up": Idiom(mlp, compiled=lambda: {"optimizer": ADAM(optimizers.schedules.CosineDecay(0.0, 4, warmup_target=0.1, warmup_steps=2))}),
    "clipnorm": Idiom(mlp, compiled=lambda: {"optimizer": SGD(0.05, clipnorm=0.1)}),
    "global_clipnorm": Idiom(mlp, compiled=lambda: {"optimizer": SGD(0.05, global_clipnorm=0.1)}),
    "clipvalue": Idiom(mlp, compiled=lambda: {"optimizer": SGD(0.05, clipvalue=0.1)}),
    "average of weights": Idiom(mlp, compiled=lambda: {"optimizer": SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)}),
    "weight decay": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.AdamW(0.01, weight_decay=0.1)}),
    "nadam": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.Nadam(0.01), "loss": keras.losses.Huber()}),
    "adafactor": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.Adafactor(0.05)}),
    "lamb": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.Lamb(0.05)}),
    "lion": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.Lion(0.01)}),
    "muon": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.Muon(0.05)}, tolerance=1e-2),
    "accumulation of Keras": Idiom(mlp, compiled=lambda: {"optimizer": ADAM(0.01, gradient_accumulation_steps=2)}),
    "loss scale": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.LossScaleOptimizer(SGD(0.05), initial_scale=8.0)}),
    "loss scale that overflows": Idiom(mlp, compiled=lambda: {"optimizer": optimizers.LossScaleOptimizer(SGD(0.05), initial_scale=2.0**127)}, refused="the loss scale is"),
    # ---- arguments of compile
    "accuracy": Idiom(classes, (X, LABELS), lambda: KINDS | {"metrics": ["accuracy"]}, use=asked),
    "metrics with a state": Idiom(mlp, compiled=lambda: {"metrics": [keras.metrics.R2Score(), "mae"], "weighted_metrics": ["mse"]}, fit=lambda: {"sample_weight": WEIGHTS}),
    "a curve": Idiom(lambda: mlp(activation="sigmoid"), (X, (TARGETS > 0) * 1.0), lambda: {"loss": "binary_crossentropy", "metrics": [keras.metrics.AUC()]}),
    "a function as loss": Idiom(mlp, compiled=lambda: {"loss": lambda y, made: ops.mean(ops.abs(y - made))}),
    "a sum as loss": Idiom(mlp, compiled=lambda: {"loss": keras.losses.Huber(reduction="sum")}),
    "ignored classes": Idiom(lambda: mlp(units=3), (X, LABELS), lambda: {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)}),
    "steps_per_execution": Idiom(mlp, compiled=lambda: {"steps_per_execution": 3}),
    "without jit": Idiom(mlp, compiled=lambda: {"jit_compile": False}),
    "eagerly": Idiom(mlp, compiled=lambda: {"run_eagerly": True}, refused="run_eagerly is True"),
    "two outputs": Idiom(two_outputs, (X, BOTH), lambda: {"loss": {"value": "mse", "kind": LOGITS}, "loss_weights": {"value": 0.5, "kind": 2.0}, "metrics": {"kind": ["accuracy"]}}),
    "two inputs": Idiom(two_inputs, ({"rows": X, "series": SERIES}, TARGETS)),
    # ---- layers
    "batch normalisation and dropout": Idiom(lambda: mlp(layers.BatchNormalization(), layers.Dropout(0.3, seed=2)), use=asked),
    "group normalisation": Idiom(lambda: mlp(layers.GroupNormalization(2))),
    "spectral normalisation": Idiom(normalised),
    "noise": Idiom(lambda: mlp(layers.GaussianNoise(0.1, seed=5))),
    "lstm": Idiom(lambda: keras.Sequential([keras.Input((4, 3)), layers.Bidirectional(layers.LSTM(3, seed=1)), layers.Dense(1)]), (SERIES, TARGETS)),
    "gru with dropout": Idiom(lambda: keras.Sequential([keras.Input((4, 3)), layers.GRU(3, dropout=0.2, seed=1), layers.Dense(1)]), (SERIES, TARGETS)),
    "stateful lstm": Idiom(lambda: keras.Sequential([keras.Input(batch_shape=(4, 4, 3)), layers.LSTM(3, stateful=True), layers.Dense(1)]), (SERIES, TARGETS), refused="layer 'lstm.*' is stateful"),
    "convolutions of series": Idiom(lambda: keras.Sequential([keras.Input((4, 3)), layers.Conv1D(4, 2, strides=2, activation="relu"), layers.GRU(3, seed=1), layers.Dense(1)]), (SERIES, TARGETS)),
    "pooled images": Idiom(lambda: keras.Sequential([keras.Input((4, 4, 2)), layers.Conv2D(4, 3, padding="same"), layers.MaxPooling2D(2), layers.Flatten(), layers.Dropout(0.5, seed=6), layers.Dense(3)]), (IMAGES, LABELS), lambda: {"loss": LOGITS, "metrics": [keras.metrics.SparseTopKCategoricalAccuracy(2)]}),
    "attention": Idiom(attention, (SERIES, TARGETS)),
    "masked tokens": Idiom(lambda: keras.Sequential([keras.Input((5,)), layers.Embedding(7, 3, mask_zero=True), layers.LSTM(3, seed=1), layers.Dense(1)]), (TOKENS, TARGETS)),
    "images": Idiom(lambda: keras.Sequential([keras.Input((4, 4, 2)), layers.RandomFlip(seed=3), layers.Conv2D(3, 3), layers.GlobalAveragePooling2D(), layers.Dense(1)]), (IMAGES, TARGETS)),
    "regularizers and constraints": Idiom(lambda: mlp(layers.Dense(4, kernel_regularizer=WEAK, activity_regularizer=WEAK, kernel_constraint=keras.constraints.MaxNorm(0.5)))),
    "mixed precision": Idiom(lambda: mlp(layers.Dense(4, dtype="mixed_bfloat16")), tolerance=1e-2),
    "half precision": Idiom(lambda: mlp(layers.Dense(4, dtype="mixed_float16")), tolerance=1e-2),
    "adapted": Idiom(lambda: mlp(layers.Normalization(mean=0.5, variance=2.0))),
    "lora": Idiom(lambda: keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(1)]), use=with_lora, tolerance=1e-5),
    "subclassed": Idiom(WithPenalty, use=asked),
    # ---- data
    "weights of rows": Idiom(mlp, fit=lambda: {"sample_weight": WEIGHTS}),
    "weights of classes": Idiom(classes, (X, LABELS), lambda: KINDS, fit=lambda: {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
    "validation": Idiom(mlp, compiled=lambda: {"metrics": ["mae"]}, fit=lambda: {"validation_data": (X[:20], TARGETS[:20], WEIGHTS[:20]), "validation_freq": 2}),
    "validation_split": Idiom(mlp, fit=lambda: {"validation_split": 0.25}),
    "batches by number": Idiom(mlp, (Batches(4, 8),), fit=lambda: {"batch_size": None}),
    "a generator": Idiom(mlp, use=with_generator),
    # ---- callbacks
    "rates": Idiom(mlp, fit=callbacks(lambda: LearningRateScheduler(halved), lambda: ReduceLROnPlateau("loss", patience=1, min_delta=9.0))),
    "rates in executions": Idiom(mlp, compiled=lambda: {"steps_per_execution": 3}, fit=callbacks(lambda: LearningRateScheduler(halved))),
    "early stopping": Idiom(mlp, fit=callbacks(lambda: EarlyStopping("loss", min_delta=9.0, patience=1, restore_best_weights=True))),
    "swapped averages": Idiom(mlp, compiled=lambda: {"optimizer": SGD(0.05, use_ema=True)}, fit=callbacks(lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True))),
    "functions as callbacks": Idiom(mlp, fit=callbacks(lambda: LambdaCallback(on_train_batch_end=lambda batch, logs: None), keras.callbacks.TerminateOnNaN)),
    # ---- actions between calls
    "frozen between": Idiom(mlp, use=frozen_between),
    "thawed between": Idiom(mlp, use=thawed_between),
    "written between": Idiom(mlp, use=written_between),
    "single batches": Idiom(mlp, compiled=lambda: {"metrics": ["mae"]}, use=in_batches),
    # ---- models of the user's own
    "own train_step": Idiom(rebuilt(OfTheGuide), compiled=lambda: {"metrics": ["mae"]}),
    "own compute_loss": Idiom(rebuilt(OwnLoss)),
    "own test_step": Idiom(rebuilt(OwnTestStep), use=asked, refused="OwnTestStep overrides test_step"),
}  # fmt: skip


RARE = (
    "warm-up", "clipvalue", "nadam", "adafactor", "lamb", "convolutions of series", "pooled images", "lion",
    "accumulation of Keras", "a curve", "ignored classes", "without jit", "group normalisation", "noise", "gru with dropout",
    "images", "lora", "validation_split", "a generator", "muon", "swapped averages", "thawed between", "own train_step",
    "half precision", "two inputs", "lstm", "attention", "two outputs", "clipnorm", "global_clipnorm", "adapted", "momentum",
    "spectral normalisation", "metrics with a state", "batches by number", "schedule in executions", "weights of classes",
    "regularizers and constraints", "weight decay", "a sum as loss", "average of weights", "rates in executions", "loss scale",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.complete if name in RARE else ()) for name in IDIOMS]
)
def test_an_idiom_of_keras_is_right_or_refused(in_scopes, name):
    idiom = IDIOMS[name]
    if idiom.refused:
        with pytest.raises(Exception, match=idiom.refused):
            in_scopes(1, lambda strategy: idiom.run())
        return
    [found] = in_scopes(1, lambda strategy: idiom.run(), 1)
    for one, other in zip(found, idiom.run(), strict=True):
        scale = max(1.0, np.abs(other).max(initial=0))
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=idiom.tolerance)
    [alone] = in_scopes(1, lambda strategy: idiom.run())
    for found in in_scopes(2, lambda strategy: idiom.run()):
        assert [one.tobytes() for one in found] == [one.tobytes() for one in alone]
