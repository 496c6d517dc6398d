"""Losses of models of sentences and signals: attention, recurrence, cumulative sums, Fourier transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strategies import Outcome, recomputation_checkpoint
from zoo.images import cross_entropy, normalised

HEADS = 4
KEPT = 0.9


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, KEPT, x.shape), x / KEPT, 0)


def transformer_loss(variables, batch, key):
    """Use pre-norm blocks with a causal mask and dropout; the logits use the table of words, too."""
    words, following = batch["word"][:, :-1], batch["word"][:, 1:]
    hidden = variables["embedding"][words] + variables["position"]
    for number, block in enumerate(variables["blocks"]):
        keys = jax.random.split(jax.random.fold_in(key, number))
        hidden = hidden + dropout(self_attention(block, normalised(hidden, -1) * block["scale"]), keys[0])
        inner = jax.nn.gelu((normalised(hidden, -1) * block["inner_scale"]) @ block["up"])
        hidden = recomputation_checkpoint(hidden + dropout(inner @ block["down"], keys[1]))
    hidden = normalised(hidden, -1) * variables["scale"]
    return cross_entropy(hidden @ variables["embedding"].T, following)


def self_attention(block, hidden):
    rows, length, width = hidden.shape
    split = (hidden @ block["qkv"]).reshape(rows, length, 3, HEADS, -1)
    query, key, value = (split[:, :, number].transpose(0, 2, 1, 3) for number in range(3))
    scores = query @ key.swapaxes(2, 3) / (width // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jax.nn.softmax(scores, axis=-1) @ value
    return mixed.transpose(0, 2, 1, 3).reshape(rows, length, width) @ block["out"]


def weighted_loss(variables, batch, key):
    """Average over some of the words, with their number as the weight: micro-batches have different numbers of them."""
    words, following = batch["word"][:, :-1], batch["word"][:, 1:]
    hidden = recomputation_checkpoint(jnp.tanh(variables["table"][words] @ variables["hidden"]))
    logs = jax.nn.log_softmax(hidden @ variables["last"])
    counts = following % 3 == 0
    number = counts.sum()
    losses = jnp.where(counts, -jnp.take_along_axis(logs, following[..., None] % logs.shape[-1], -1)[..., 0], 0)
    return Outcome(losses.sum() / number, weight=number)


def attention_loss(variables, batch, key):
    """Compute softmax by its logarithm, as kernels do that keep no scores."""
    hidden = jnp.tanh(batch["signal"] @ variables["given"])
    query, keys, value = (hidden @ variables[name] for name in ("query", "key", "value"))
    scores = query @ keys.swapaxes(1, 2) / 8
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    mixed = recomputation_checkpoint(hidden + weights @ value)
    return cross_entropy(mixed.mean(1) @ variables["last"], batch["label"])


def lstm_loss(variables, batch, key):
    given = recomputation_checkpoint(batch["signal"] @ variables["given"] + variables["bias"])

    def step(state, given):
        cell, hidden = state
        into, forget, out, new = jnp.split(given + hidden @ variables["before"], 4, axis=-1)
        cell = jax.nn.sigmoid(forget + 1) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return (cell, hidden), hidden

    zeros = jnp.zeros((given.shape[0], given.shape[2] // 4), given.dtype)
    _, every = jax.lax.scan(step, (zeros, zeros), given.swapaxes(0, 1))
    return cross_entropy(every.mean(0) @ variables["last"], batch["label"])


def cumsum_loss(variables, batch, key):
    """Compute linear attention: running sums of values over running sums of weights."""
    values = jnp.tanh(batch["signal"] @ variables["given"])
    weights = recomputation_checkpoint(jax.nn.softplus(batch["signal"] @ variables["gate"]))
    means = jnp.cumsum(weights * values, axis=1) / jnp.cumsum(weights, axis=1)
    return cross_entropy((normalised(means, -1) * variables["scale"]).mean(1) @ variables["last"], batch["label"])


def fft_loss(variables, batch, key):
    """Filter complex frequencies, and use the energy that passes."""
    hidden = recomputation_checkpoint(batch["signal"] @ variables["given"])
    spectrum = jnp.fft.rfft(hidden, axis=1) * jax.lax.complex(variables["real"], variables["imaginary"])
    passed = jnp.fft.irfft(spectrum, axis=1)
    return cross_entropy(jnp.log1p((passed**2).mean(1)) @ variables["last"], batch["label"])
