"""Losses of models whose computation depends on the data: tables, experts, loops, sorting."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strategies import recomputation_checkpoint
from zoo.images import cross_entropy, flat


def embedding_loss(variables, batch, key):
    """Gather rows of a table, and add weights of words at the words' places."""
    words = batch["word"][:, :-1]
    hidden = recomputation_checkpoint(jnp.tanh(variables["table"][words] @ variables["hidden"]))
    weights = jax.nn.softplus(hidden @ variables["weight"])[..., 0]
    rows = jnp.arange(len(words))[:, None]
    bag = jnp.zeros((len(words), len(variables["bag"])), weights.dtype).at[rows, words].add(weights)
    logits = bag @ variables["bag"] + hidden.mean(1) @ variables["last"]
    return cross_entropy(logits, batch["word"][:, -1] % 10)


def experts_loss(variables, batch, key):
    """Send each row to two of five experts, with a loss that spreads rows over them."""
    hidden = recomputation_checkpoint(jax.nn.relu(flat(batch) @ variables["first"]))
    shares = jax.nn.softmax(hidden @ variables["router"])
    best, chosen = jax.lax.top_k(shares, 2)
    up, down = variables["up"][chosen], variables["down"][chosen]
    inner = jax.nn.gelu(jnp.einsum("rw,rkwi->rki", hidden, up))
    mixed = jnp.einsum("rki,rkiw,rk->rw", inner, down, best / best.sum(-1, keepdims=True))
    load = jnp.zeros(shares.shape[1]).at[chosen].add(1 / chosen.size)
    spread = shares.shape[1] * jnp.sum(load * shares.mean(0))
    return cross_entropy((hidden + mixed) @ variables["last"], batch["label"]) + 0.01 * spread


def loops_loss(variables, batch, key):
    """Repeat layers until a fixed point is near, take one of two branches by the data, and loop a fixed number of
    times.
    """
    given = flat(batch) @ variables["first"]

    def layer(hidden):
        return jnp.tanh(given + 0.5 * hidden @ variables["again"])

    def is_far(state):
        count, hidden, change = state
        return (count < 20) & (change > 1e-3)

    def nearer(state):
        count, hidden, _ = state
        new = layer(hidden)
        return count + 1, new, jnp.abs(new - hidden).max()

    start = jnp.int32(0), jnp.zeros_like(given), jnp.float32(1)
    count, near, _ = jax.lax.stop_gradient(jax.lax.while_loop(is_far, nearer, start))
    hidden = recomputation_checkpoint(layer(near))
    hidden = jax.lax.cond(
        batch["image"].mean() > 0.3,
        lambda hidden: jax.nn.gelu(hidden @ variables["other"]),
        lambda hidden: jnp.sin(hidden @ variables["other"].T),
        hidden,
    )
    hidden = jax.lax.fori_loop(0, 3, lambda _, hidden: hidden + layer(hidden) / 3, hidden)
    return cross_entropy(hidden @ variables["last"], batch["label"]), {"count": count.astype(jnp.float32)}


def sorting_loss(variables, batch, key):
    """Use order statistics of the hidden layer, and its rows in the order of their medians."""
    hidden = recomputation_checkpoint(jax.nn.gelu(flat(batch) @ variables["first"]))
    ordered = jnp.sort(hidden, axis=-1)
    order = jnp.argsort(ordered[:, ordered.shape[1] // 2])
    mixed = jnp.tanh(ordered @ variables["weight"])
    near = (mixed[order] * jnp.linspace(-1, 1, len(order))[:, None]).sum(0)
    return cross_entropy((mixed + 0.1 * near) @ variables["last"], batch["label"])
