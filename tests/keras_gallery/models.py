"""Seven small models of the kinds in Keras's own examples, with data made here or from scikit-learn.

Each is a function that returns an `Example`. Together they have functional and subclassed models, custom layers and
losses, shared and nested layers, several inputs and outputs, recurrence, attention, embeddings, moving statistics, a
sampled layer, and losses that layers add. `test_keras_idioms.py` has models of one layer after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS = 160
"""Rows of each example: five steps of 32 rows."""


@dataclass(frozen=True)
class Example:
    """A model with its data and the arguments of `compile`.

    Attributes:
        build: Makes the model, with weights that follow from Keras's random seed.
        x: The inputs: arrays `[ROWS, ...]`, or a tuple or dictionary of them.
        y: The targets.
        compile: Returns the arguments of `compile`, with a new optimizer each time.
        draws: Whether the model draws random numbers, which differ between replicas.
        mixes_rows: Whether a row's result depends on the other rows of its replica's batch.
    """

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    compile: Callable[[], Mapping[str, Any]]
    draws: bool = False
    mixes_rows: bool = False

    @property
    def is_alike_in_parts(self) -> bool:
        """Return whether the mean over replicas equals the result of one batch of all their rows."""
        return not (self.draws or self.mixes_rows)


def register(of: type) -> type:
    """Register a class or function of this module for saved models."""
    return keras.saving.register_keras_serializable("gallery")(of)


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return handwritten digits, float32 `[ROWS, 8, 8, 1]` from 0 to 1, and their labels, int32 `[ROWS]`."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images[:ROWS, ..., None] / 16).astype(np.float32), found.target[:ROWS].astype(np.int32)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normally distributed float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- convolutions


def residual_net() -> Example:
    """Return a network of blocks with shortcuts and batch normalisation."""
    images, labels = digits()

    def block(x: Any, filters: int, strides: int) -> Any:
        shortcut = layers.Conv2D(filters, 1, strides=strides, use_bias=False)(x)
        x = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.add([layers.BatchNormalization(momentum=0.9)(x), shortcut]))

    def build() -> keras.Model:
        inputs = keras.Input((8, 8, 1))
        x = block(block(inputs, 4, 1), 8, 2)
        outputs = layers.Dense(10, "softmax")(layers.GlobalAveragePooling2D()(x))
        return keras.Model(inputs, outputs)

    return Example(
        build,
        images,
        keras.utils.to_categorical(labels, 10),
        lambda: {
            "optimizer": keras.optimizers.AdamW(1e-3, weight_decay=1e-2, clipnorm=1.0),
            "loss": keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
            "metrics": ["accuracy"],
        },
        mixes_rows=True,
    )


# ---- variational autoencoder


@register
class Sampling(layers.Layer):
    """A layer that draws from a normal distribution, and adds its distance from a standard one to the loss."""

    def __init__(self, weight: float = 0.05, **named: Any) -> None:
        super().__init__(**named)
        self.weight = weight
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        divergence = -0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.add_loss(self.weight * divergence)
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "weight": self.weight}


def vae() -> Example:
    """Return a variational autoencoder of two nested models."""
    images, _ = digits()
    flat = images.reshape(ROWS, 64)

    def build() -> keras.Model:
        inputs = keras.Input((64,))
        hidden = layers.Dense(24, "relu")(inputs)
        encoded = Sampling()([layers.Dense(4, name="mean")(hidden), layers.Dense(4, name="log_variance")(hidden)])
        encoder = keras.Model(inputs, encoded, name="encoder")
        decoder = keras.Sequential(
            [keras.Input((4,)), layers.Dense(24, "relu"), layers.Dense(64, "sigmoid")], name="decoder"
        )
        return keras.Model(inputs, decoder(encoder(inputs)), name="vae")

    return Example(
        build, flat, flat, lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": "binary_crossentropy"}, draws=True
    )


# ---- text


@register
class Embedded(layers.Layer):
    """Sum of the embeddings of tokens and positions."""

    def __init__(self, words: int, length: int, width: int, **named: Any) -> None:
        super().__init__(**named)
        self.settings = {"words": words, "length": length, "width": width}
        self.tokens = layers.Embedding(words, width)
        self.positions = layers.Embedding(length, width)

    def build(self, shape: Any) -> None:
        self.tokens.build(shape)
        self.positions.build(shape[-1:])

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.positions(ops.arange(ops.shape(tokens)[-1]))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


@register
class TransformerBlock(layers.Layer):
    """Attention and two dense layers, each normalised and with a shortcut."""

    def __init__(self, width: int, heads: int, **named: Any) -> None:
        super().__init__(**named)
        self.settings = {"width": width, "heads": heads}
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.dense = keras.Sequential([layers.Dense(2 * width, "gelu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        for layer in (self.dense, *self.norms):
            layer.build(shape)

    def call(self, x: Any) -> Any:
        x = self.norms[0](x + self.attention(x, x))
        return self.norms[1](x + self.dense(x))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


def text_classification() -> Example:
    """Return a transformer that tells whether some words are more frequent than others."""
    tokens = np.random.default_rng(1).integers(0, 20, (ROWS, 12)).astype(np.int32)
    labels = ((tokens < 8).sum(1) > (tokens >= 12).sum(1)).astype(np.float32)

    def build() -> keras.Model:
        inputs = keras.Input((12,), dtype="int32")
        x = TransformerBlock(16, 2)(Embedded(20, 12, 16)(inputs))
        x = layers.Dense(8, "relu")(layers.GlobalAveragePooling1D()(x))
        return keras.Model(inputs, layers.Dense(1, "sigmoid")(x))

    return Example(
        build,
        tokens,
        labels,
        lambda: {
            "optimizer": keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.9),
            "loss": "binary_crossentropy",
            "metrics": ["accuracy", keras.metrics.AUC(num_thresholds=20, name="auc")],
        },
    )


def sequence_to_sequence() -> Example:
    """Return a model that reverses sequences: one LSTM's states start another, which gets the previous targets."""
    words, length = 6, 5
    given = np.random.default_rng(2).integers(1, words, (ROWS, length)).astype(np.int32)
    wanted = given[:, ::-1]
    before = np.concatenate([np.zeros((ROWS, 1), np.int32), wanted[:, :-1]], axis=1)
    one_hot = np.eye(words, dtype=np.float32)

    def build() -> keras.Model:
        sources = keras.Input((length, words), name="source")
        _, *states = layers.LSTM(16, return_state=True)(sources)
        targets = keras.Input((length, words), name="before")
        decoded = layers.LSTM(16, return_sequences=True)(targets, initial_state=states)
        return keras.Model([sources, targets], layers.Dense(words, "softmax")(decoded))

    return Example(
        build,
        (one_hot[given], one_hot[before]),
        np.ascontiguousarray(wanted),
        lambda: {
            "optimizer": keras.optimizers.RMSprop(0.01),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
        },
    )


# ---- shared layers


@register
def contrastive_loss(y_true: Any, y_pred: Any) -> Any:
    """Return a loss that draws equal pairs together, and others apart up to a margin."""
    return ops.mean(y_true * ops.square(y_pred) + (1 - y_true) * ops.square(ops.maximum(1 - y_pred, 0)), axis=-1)


@register
class Distance(layers.Layer):
    """Euclidean distance of two vectors."""

    def call(self, first: Any, second: Any) -> Any:
        return ops.sqrt(ops.maximum(ops.sum(ops.square(first - second), axis=1, keepdims=True), 1e-7))


def siamese() -> Example:
    """Return a model that tells whether two images show the same digit: a shared tower, and a custom loss."""
    images, labels = digits()
    others = np.random.default_rng(3).permutation(ROWS)

    def build() -> keras.Model:
        tower = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="tanh"), layers.Flatten(), layers.Dense(8)],
            name="tower",
        )
        first, second = keras.Input((8, 8, 1), name="first"), keras.Input((8, 8, 1), name="second")
        return keras.Model([first, second], Distance()(tower(first), tower(second)))

    return Example(
        build,
        (images, images[others]),
        (labels == labels[others]).astype(np.float32)[:, None],
        lambda: {"optimizer": keras.optimizers.Adam(1e-3), "loss": contrastive_loss},
    )


# ---- others


@register
class Autoencoder(keras.Model):
    """Subclassed model: an encoder and a decoder of convolutions."""

    def __init__(self, filters: int, **named: Any) -> None:
        super().__init__(**named)
        self.filters = filters
        self.encoder = keras.Sequential(
            [layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.AveragePooling2D(2)]
        )
        self.decoder = keras.Sequential(
            [
                layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
            ]
        )

    def call(self, images: Any) -> Any:
        return self.decoder(self.encoder(images))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "filters": self.filters}


def autoencoder() -> Example:
    """Return a model that removes noise from images."""
    images, _ = digits()
    noisy = np.clip(images + 0.3 * random(*images.shape, seed=4), 0, 1).astype(np.float32)
    return Example(
        lambda: Autoencoder(6),
        noisy,
        images,
        lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": "binary_crossentropy", "metrics": ["mae"]},
    )


def tabular() -> Example:
    """Return a model of a table: numbers, a category and flags as named inputs; a price and a sale as outputs."""
    numbers, chance = random(ROWS, 4, seed=6), np.random.default_rng(7)
    kind = chance.integers(0, 5, (ROWS,)).astype(np.int32)
    flags = chance.integers(0, 2, (ROWS, 3)).astype(np.float32)
    price = (numbers @ np.float32([1, -2, 0.5, 0]) + kind / 2 + flags.sum(1)).astype(np.float32)

    def build() -> keras.Model:
        inputs = {
            "numbers": keras.Input((4,), name="numbers"),
            "kind": keras.Input((), dtype="int32", name="kind"),
            "flags": keras.Input((3,), name="flags"),
        }
        normal = layers.Normalization(mean=[0.1, 0, -0.1, 0], variance=[1, 2, 1, 1])(inputs["numbers"])
        joined = layers.concatenate([normal, layers.Embedding(5, 3)(inputs["kind"]), inputs["flags"]])
        hidden = layers.Dense(16, "swish")(joined)
        outputs = {
            "price": layers.Dense(1, name="price")(hidden),
            "sold": layers.Dense(1, "sigmoid", name="sold")(hidden),
        }
        return keras.Model(inputs, outputs)

    return Example(
        build,
        {"numbers": numbers, "kind": kind, "flags": flags},
        {"price": price[:, None], "sold": (price > 1).astype(np.float32)[:, None]},
        lambda: {
            "optimizer": keras.optimizers.Adagrad(0.1),
            "loss": {"price": "mse", "sold": "binary_crossentropy"},
            "loss_weights": {"price": 0.3, "sold": 1.0},
            "metrics": {"price": ["mae"], "sold": ["accuracy"]},
        },
    )


MADE = (residual_net, vae, text_classification, sequence_to_sequence, siamese, autoencoder, tabular)
GALLERY: Mapping[str, Callable[[], Example]] = {made.__name__: made for made in MADE}
