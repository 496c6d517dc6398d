"""Small models whose loss functions mark stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import strategies
from zoo.model import variables_of

ROWS = 3
"""Rows of a micro-batch."""


@dataclass(frozen=True)
class Staged:
    """A model in stages.

    Attributes:
        loss_fn: As `strategies.Trainer` takes it.
        variables: Makes the first variables.
        model_state: Makes the first model state; None if there is none.
        rows: (number of rows, seed) -> a batch of this number.
        mappings: Mappings of the stages to devices.
        options: Options of the trainer.
    """

    loss_fn: Callable[..., Any]
    variables: Callable[[], Any]
    rows: Callable[[int, int], Any]
    mappings: tuple[tuple[int, ...], ...]
    model_state: Callable[[], Any] = lambda: None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.mappings[0])

    @property
    def count(self) -> int:
        """Return a number of micro-batches that all schedules accept."""
        return 2 * self.stages


def mlp_loss(variables: Any, batch: Any, key: jax.Array) -> Any:
    """Use four layers with dropout; the last one also takes the first one's output."""
    keys = jax.random.split(key)
    with strategies.pipeline_stage(0):
        first = jnp.tanh(batch["x"] @ variables["first"] + variables["bias"])
    with strategies.pipeline_stage(1):
        kept = jax.random.bernoulli(keys[0], 0.8, first.shape)
        second = jax.nn.gelu(jnp.where(kept, first, 0) @ variables["second"])
    with strategies.pipeline_stage(2):
        third = jax.nn.silu(second @ variables["third"])
    with strategies.pipeline_stage(3):
        predicted = (third + first) @ variables["last"]
        error = predicted - batch["y"]
    return jnp.mean(error**2), {"largest": jnp.abs(error).max(), "spread": jnp.std(second)}


def _mlp_rows(count: int, seed: int) -> Any:
    draw = np.random.default_rng(seed).standard_normal
    return {"x": draw((count, 19)).astype(np.float32), "y": draw((count, 5)).astype(np.float32)}


def cnn_loss(variables: Any, batch: Any, key: jax.Array) -> Any:
    """Use convolutions in one stage, and the rest in another."""
    with strategies.pipeline_stage(0):
        image = _convolve(batch["image"], variables["first"])
        image = jax.nn.relu(_convolve(image, variables["second"]))
        pooled = jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    with strategies.pipeline_stage(1):
        logits = pooled.reshape(len(pooled), -1) @ variables["last"]
        chances = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
    return -chances.mean(), {"right": (logits.argmax(1) == batch["label"]).mean()}


def _convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _images(count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.random((count, 8, 8, 1), np.float32),
        "label": rng.integers(0, 10, count).astype(np.int32),
    }


def transformer_loss(variables: Any, batch: Any, key: jax.Array) -> Any:
    """Use an embedding in the first and the last stage, and two equal blocks."""
    with strategies.pipeline_stage(0):
        x = variables["table"][batch["word"][:, :-1]]
        x = _block(variables["blocks"][0], x)
    with strategies.pipeline_stage(1):
        x = _block(variables["blocks"][1], x)
    with strategies.pipeline_stage(2):
        logits = _norm(x) @ variables["table"].T
        chances = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["word"][:, 1:, None], 2)
    return -chances.mean()


def _norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _block(weights: Any, x: jax.Array) -> jax.Array:
    query, key, value = jnp.split((_norm(x) * weights["scale"]) @ weights["qkv"], 3, -1)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), query @ jnp.swapaxes(key, 1, 2), -jnp.inf)
    x = x + jax.nn.softmax(scores / 4) @ value @ weights["out"]
    return x + jax.nn.gelu(_norm(x) @ weights["up"]) @ weights["down"]


def _blocks() -> Any:
    block = {"scale": (16,), "qkv": (16, 48), "out": (16, 16), "up": (16, 64), "down": (64, 16)}
    return {"table": variables_of(table=(67, 16))["table"], "blocks": [variables_of(**block), variables_of(**block)]}


def _sentences(count: int, seed: int) -> Any:
    return {"word": np.random.default_rng(seed).integers(0, 67, (count, 12)).astype(np.int32)}


def batch_norm_loss(variables: Any, batch: Any, key: jax.Array, model_state: Any) -> Any:
    """Keep moving means in both stages, and a counter."""
    with strategies.pipeline_stage(0):
        x, first = _normalised(batch["x"] @ variables["first"], model_state["first"])
        seen = model_state["seen"] + len(batch["x"])
    with strategies.pipeline_stage(1):
        x, second = _normalised(jax.nn.relu(x) @ variables["second"], model_state["second"])
        loss = jnp.mean((x @ variables["last"] - batch["y"]) ** 2)
    return strategies.Outcome(
        loss, {"seen": seen}, {"first": first, "second": second, "seen": seen, "still": model_state["still"]}
    )


def _normalised(x: jax.Array, moving: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-3) + moving, 0.9 * moving + 0.1 * x.mean(0)


def _moving() -> Any:
    zeros = {name: np.zeros(17, np.float32) for name in ("first", "second")}
    return {**zeros, "seen": np.int32(0), "still": np.float32(3)}


MODELS = {
    "mlp": Staged(
        mlp_loss,
        lambda: variables_of(first=(19, 23), bias=(23,), second=(23, 23), third=(23, 23), last=(23, 5)),
        _mlp_rows,
        ((0, 1, 2, 3), (0, 1, 1, 0), (0, 0, 0, 0)),
    ),
    "cnn": Staged(
        cnn_loss,
        lambda: variables_of(first=(3, 3, 1, 6), second=(3, 3, 6, 6), last=(96, 10)),
        _images,
        ((0, 1), (1, 0), (0, 0)),
    ),
    "transformer": Staged(transformer_loss, _blocks, _sentences, ((0, 1, 0), (1, 0, 1), (0, 0, 0))),
    "batch norm": Staged(
        batch_norm_loss,
        lambda: variables_of(first=(19, 17), second=(17, 17), last=(17, 5)),
        _mlp_rows,
        ((0, 1), (0, 0)),
        _moving,
    ),
}


STEPS = 3


def trained(strategy: strategies.Strategy, model: Staged, pipeline: Any, **options: Any) -> list[Any]:
    """Train, and return the fingerprints of variables, optimizer state, model state and metrics."""
    options = {"gradient_accumulation_count": model.count, **model.options, **options}
    trainer = strategies.Trainer(strategy, model.loss_fn, optax.sgd(0.01, momentum=0.9), pipeline=pipeline, **options)
    state = trainer.init(model.variables(), model.model_state())
    found = []
    every = [model.rows(strategy.num_replicas_in_sync * model.count * ROWS, step) for step in range(STEPS)]
    data = jax.tree.map(lambda *leaves: np.concatenate(leaves), *every)
    dataset = strategy.distribute_dataset(data, ROWS, shuffle=False, gradient_accumulation_count=model.count)
    for batch in dataset.epoch(0):
        state, metrics = trainer.step(state, batch)
        found.append(dict(metrics))
    kept = (state.variables, state.optimizer_state, state.model_state, found)
    return [strategies.fingerprint(one) if one is not None else None for one in kept]
