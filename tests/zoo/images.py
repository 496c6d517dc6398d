"""Losses of models of the digits: dense layers, convolutions, normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from strategies import recomputation_checkpoint

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
EPSILON = 1e-5


def cross_entropy(logits, label):
    """Return the mean over the rows, float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), label).mean()


def flat(batch):
    return batch["image"].reshape(len(batch["image"]), -1)


def mlp_loss(variables, batch, key):
    hidden = jax.nn.relu(flat(batch) @ variables["first"] + variables["first_bias"])
    hidden = recomputation_checkpoint(hidden)
    hidden = jax.nn.gelu(hidden @ variables["second"] + variables["second_bias"])
    return cross_entropy(hidden @ variables["last"], batch["label"])


def wide_loss(variables, batch, key):
    """Use one layer of repeated pixels."""
    width = len(variables["matrix"])
    rows = jnp.tile(flat(batch), (1, width // 64 + 1))[:, :width]
    return cross_entropy(jax.nn.gelu(rows @ variables["matrix"] + variables["bias"])[:, :10], batch["label"])


def convolution(images, kernel):
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS)


def pooled(images):
    return jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def cnn_loss(variables, batch, key):
    hidden = pooled(jax.nn.relu(convolution(batch["image"], variables["first"])))
    hidden = recomputation_checkpoint(hidden)
    hidden = pooled(jax.nn.relu(convolution(hidden, variables["second"])))
    return cross_entropy(hidden.reshape(len(hidden), -1) @ variables["last"], batch["label"])


def patches_loss(variables, batch, key):
    """Compute the same convolutions as products with patches."""

    def of_patches(images, kernel):
        return (
            jax.lax.conv_general_dilated_patches(images, (3, 3), (1, 1), "SAME", dimension_numbers=DIMENSIONS) @ kernel
        )

    hidden = pooled(jax.nn.relu(of_patches(batch["image"], variables["first"])))
    hidden = recomputation_checkpoint(hidden)
    hidden = pooled(jax.nn.relu(of_patches(hidden, variables["second"])))
    return cross_entropy(hidden.reshape(len(hidden), -1) @ variables["last"], batch["label"])


def normalised(x, axes):
    """Normalise by mean and variance over these axes."""
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + EPSILON)


def batch_norm_loss(variables, batch, key):
    """Normalise by the statistics of the micro-batch, as textbooks write it."""

    def of_batch(x):
        return (x - x.mean(0)) / jnp.sqrt(x.var(0) + EPSILON)

    hidden = of_batch(flat(batch) @ variables["first"]) * variables["scale"] + variables["offset"]
    hidden = recomputation_checkpoint(jax.nn.relu(hidden))
    hidden = of_batch(hidden @ variables["second"]) * variables["second_scale"] + variables["second_offset"]
    return cross_entropy(jax.nn.relu(hidden) @ variables["last"], batch["label"])


def norms_loss(variables, batch, key):
    """Normalise groups of channels, then layers."""
    hidden = convolution(batch["image"], variables["first"])
    grouped = normalised(hidden.reshape(*hidden.shape[:3], 4, -1), (1, 2, 4)).reshape(hidden.shape)
    hidden = jax.nn.silu(grouped * variables["scale"] + variables["offset"])
    hidden = recomputation_checkpoint(hidden.reshape(len(hidden), -1))
    hidden = jax.nn.relu(normalised(hidden @ variables["second"], -1) * variables["second_scale"])
    return cross_entropy(hidden @ variables["last"], batch["label"])
