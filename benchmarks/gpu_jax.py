"""The models of `gpu.py` in JAX, and the ways to train them: plain, by hand, and with this project."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpu_task import (
    BY_HAND,
    COPY,
    HEAD,
    LEARNING_RATE,
    MLP,
    PLAIN,
    GpuCase,
    GpuSteps,
    batches_of,
    data_of,
    gpt_size,
    mlp_widths,
    rows_of,
)
from resident_memory import peak_bytes

Loss = Callable[..., jax.Array]


def steps_of(case: GpuCase) -> GpuSteps:
    return {PLAIN: PlainJax, BY_HAND: ByHandJax}.get(case.way, OursJax)(case)


# ---- models


def task_of(case: GpuCase) -> tuple[Loss, Any]:
    """Return the loss function of a model, and its initial variables."""
    if case.model == MLP:
        return mlp_loss, mlp_variables(case)
    return (copy_loss if case.model == COPY else gpt_loss), gpt_variables(case)


def optimizer_of(case: GpuCase) -> optax.GradientTransformation:
    return optax.sgd(LEARNING_RATE) if case.model == COPY else optax.adamw(LEARNING_RATE)


def gpt_variables(case: GpuCase) -> Any:
    """Return the variables of a decoder that has one table for tokens and logits."""
    size, random = gpt_size(case), np.random.default_rng(0)

    def kernel(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) * np.float32(0.02)

    def block(width: int) -> dict[str, np.ndarray]:
        norms = {"norm1": np.ones(width, np.float32), "norm2": np.ones(width, np.float32)}
        attention = {"qkv": kernel(width, 3 * width), "out": kernel(width, width)}
        return norms | attention | {"up": kernel(width, 4 * width), "down": kernel(4 * width, width)}

    return {
        "words": kernel(size.words, size.width),
        "places": kernel(size.length, size.width),
        "norm": np.ones(size.width, np.float32),
        "blocks": [block(size.width) for _ in range(size.layers)],
    }


def gpt_loss(variables: Any, batch: Any, key: Any = None) -> jax.Array:
    """Return the mean cross-entropy of the next tokens, computed in bfloat16."""
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    x = variables["words"][batch["x"]] + variables["places"]
    for block in variables["blocks"]:
        x = x + attention(normalised(x, block["norm1"]) @ block["qkv"]) @ block["out"]
        x = x + jax.nn.gelu(normalised(x, block["norm2"]) @ block["up"]) @ block["down"]
    logits = (normalised(x, variables["norm"]) @ variables["words"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(qkv: jax.Array) -> jax.Array:
    """Return causal attention, from [rows, length, 3 * width] to [rows, length, width]."""
    heads = [part.reshape(*part.shape[:2], -1, HEAD) for part in jnp.split(qkv, 3, axis=-1)]
    mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
    return mixed.reshape(*mixed.shape[:2], -1)


def mlp_variables(case: GpuCase) -> Any:
    widths, random = mlp_widths(case), np.random.default_rng(0)
    return [
        {"kernel": random.standard_normal((a, b), np.float32) / np.sqrt(a, dtype=np.float32), "bias": np.zeros(b, "f")}
        for a, b in itertools.pairwise(widths)
    ]


def mlp_loss(variables: Any, batch: Any, key: Any = None) -> jax.Array:
    *hidden, last = variables
    x = batch["x"]
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    logits = x @ last["kernel"] + last["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def copy_loss(variables: Any, batch: Any, key: Any = None) -> jax.Array:
    """Return a loss whose gradients cost only their memory."""
    return sum(leaf.sum() for leaf in jax.tree.leaves(variables)) * batch["x"].astype(jnp.float32).mean() * 1e-6


# ---- ways


class PlainJax(GpuSteps):
    """Training steps with gradients and update in one program; batches come from the host."""

    def __init__(self, case: GpuCase) -> None:
        self._loss, variables = task_of(case)
        self._optimizer = optimizer_of(case)
        self._variables = jax.device_put(variables)
        self._state = jax.jit(self._optimizer.init)(self._variables)
        self._batches = itertools.cycle(batches_of(case))
        self._step = jax.jit(self._made, donate_argnums=(0, 1))
        self._last: Any = None

    @property
    def device(self) -> str:
        """The kind of the device."""
        return jax.devices()[0].device_kind

    def step(self) -> Any:
        """Queue one program."""
        self._variables, self._state, self._last = self._step(self._variables, self._state, next(self._batches))
        return self._last

    def wait(self) -> None:
        """Wait for variables and loss."""
        jax.block_until_ready((self._variables, self._last))

    def peak_bytes(self) -> int:
        """Return the peak of XLA's allocator."""
        return peak_of_jax()

    def _made(self, variables: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(self._loss)(variables, batch)
        return *updated(self._optimizer, variables, state, gradients), loss


class ByHandJax(PlainJax):
    """Training steps written by hand: R programs in sequence, the tree of sums and the update, all on the device."""

    def __init__(self, case: GpuCase) -> None:
        super().__init__(case)
        self._replicas = case.replicas
        rows = rows_of(case) // case.replicas
        cut = [{name: array.reshape(-1, rows, *array.shape[1:]) for name, array in b.items()} for b in batches_of(case)]
        parts = [[{k: v[r] for k, v in b.items()} for r in range(case.replicas)] for b in cut]
        self._parts = itertools.cycle(parts)
        self._gradients = jax.jit(jax.value_and_grad(self._loss))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1, 2))

    def step(self) -> Any:
        """Queue R programs, R - 1 sums and the update."""
        waiting: list[Any] = []
        for replica, part in enumerate(next(self._parts), start=1):
            self._last, gradients = self._gradients(self._variables, part)
            waiting.append(gradients)
            while replica % 2 == 0:
                replica //= 2
                right = waiting.pop()
                waiting.append(self._add(waiting.pop(), right))
        while len(waiting) > 1:
            right = waiting.pop()
            waiting.append(self._add(waiting.pop(), right))
        self._variables, self._state = self._update(self._variables, self._state, waiting[0])
        return self._last

    def _updated(self, variables: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        means = jax.tree.map(lambda leaf: leaf / self._replicas, sums)
        return updated(self._optimizer, variables, state, means)


class OursJax(GpuSteps):
    """Steps of our Trainer on the replicas of this instance."""

    def __init__(self, case: GpuCase) -> None:
        import popdist
        import strategies

        popdist.init(case.replicas)
        self._fingerprint_of = strategies.fingerprint
        self._strategy = strategies.PopDistStrategy()
        loss, variables = task_of(case)
        self._trainer = strategies.Trainer(self._strategy, loss, optimizer_of(case))
        self._state = self._trainer.init(variables)
        rows = rows_of(case) // case.replicas
        dataset = self._strategy.distribute_dataset(data_of(case), batch_size=rows, shuffle=False)
        self._batches = itertools.cycle(list(dataset.epoch(0)))

    @property
    def device(self) -> str:
        """The kind of the device."""
        return jax.devices()[0].device_kind

    def step(self) -> Any:
        """Make a step, and return its metrics unread."""
        self._state, metrics = self._trainer.step(self._state, next(self._batches))
        return Unread(metrics)

    def wait(self) -> None:
        """Wait for the variables."""
        jax.block_until_ready(self._state.variables)

    def peak_bytes(self) -> int:
        """Return the peak of XLA's allocator, which does not count the driver's windows."""
        return peak_of_jax()

    def meet(self) -> None:
        """Wait for the other instances."""
        self._strategy.communicator.barrier(name="turn")

    def fingerprint(self) -> str:
        """Return the fingerprint of the variables."""
        return self._fingerprint_of(self._state.variables)


class Unread:
    """The loss of our Trainer, which is read when it is converted to a float."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def __float__(self) -> float:
        return float(self._metrics["loss"])


def updated(optimizer: optax.GradientTransformation, variables: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    changes, state = optimizer.update(gradients, state, variables)
    return optax.apply_updates(variables, changes), state


def peak_of_jax() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", 0)) or peak_bytes()
