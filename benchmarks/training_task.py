"""The models, initial variables and batches of `train_step.py`, equal for JAX and torch; needs NumPy only."""

from __future__ import annotations

import numpy as np

MODELS = ("cnn", "mlp")
IMAGE_SHAPE = (28, 28, 1)
CLASSES = 10
BATCHES = 8  # different batches, used in turn
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 5  # few: after them all ways still agree up to rounding

Arrays = dict[str, dict[str, np.ndarray]]

_KERNELS: dict[str, dict[str, tuple[int, ...]]] = {
    "cnn": {"conv": (3, 3, 1, 8), "hidden": (13 * 13 * 8, 8), "logits": (8, CLASSES)},
    "mlp": {"hidden1": (28 * 28, 1024), "hidden2": (1024, 1024), "logits": (1024, CLASSES)},
}


def first_variables(model: str) -> Arrays:
    """Return kernels initialised as in He et al. (2015), and biases of 0.1, with the example models' names."""
    random = np.random.default_rng(0)
    variables = {}
    for name, shape in _KERNELS[model].items():
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        kernel = (scale * random.standard_normal(shape)).astype(np.float32)
        variables[name] = {"kernel": kernel, "bias": np.full(shape[-1], 0.1, np.float32)}
    return variables


def dataset(batch_size: int, replicas: int) -> dict[str, np.ndarray]:
    """Return BATCHES global batches in a row, in each of them the replicas' batches in a row."""
    random = np.random.default_rng(1)
    count = BATCHES * replicas * batch_size
    images = random.random((count, *IMAGE_SHAPE), np.float32)
    return {"image": images, "label": random.integers(0, CLASSES, count).astype(np.int32)}


def batches_of(replica: int, batch_size: int, replicas: int) -> list[dict[str, np.ndarray]]:
    """Return the batches of one replica."""
    whole = dataset(batch_size, replicas)
    starts = [(step * replicas + replica) * batch_size for step in range(BATCHES)]
    return [{name: array[start : start + batch_size] for name, array in whole.items()} for start in starts]
