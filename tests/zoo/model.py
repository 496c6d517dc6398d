"""Models of the zoo: their type, first variables and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from popdist.examples.digits_data import load_digits

SEED = 7
ROWS = 1280  # five steps of two micro-batches of 32 rows on four replicas
WORDS = 1031  # times 64 they make a table of 65,984 elements


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        loss_fn: As `strategies.Trainer` takes it, with a `recomputation_checkpoint`.
        variables: Makes the first variables, float32; the same at each call.
        data: Makes the rows, a pytree of arrays; the same at each call.
        rows: The number of rows of a micro-batch.
        options: Options of the trainer that belong to the model.
    """

    loss_fn: Callable[[Any, Any, Any], Any]
    variables: Callable[[], Any]
    data: Callable[[], Any]
    rows: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)


def variables_of(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return normal numbers, scaled by the product of all axes but the last; vectors are zeros, or ones if a
    `scale`.
    """
    rng = np.random.default_rng(SEED)
    return {name: _variable(rng, name, shape) for name, shape in shapes.items()}


def _variable(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.full(shape, "scale" in name, np.float32)
    return rng.standard_normal(shape).astype(np.float32) / np.float32(np.prod(shape[:-1]) ** 0.5)


def digits() -> dict[str, np.ndarray]:
    """Return the digits of scikit-learn: `image` float32 [1438, 8, 8, 1] from 0 to 1, `label` int32 [1438]."""
    read = load_digits("digits")
    return {"image": read.train_images, "label": read.train_labels}


def sentences() -> dict[str, np.ndarray]:
    """Return `word` int32 [ROWS, 17] below WORDS, small numbers more often."""
    rng = np.random.default_rng(SEED)
    return {"word": (WORDS * rng.random((ROWS, 17)) ** 3).astype(np.int32)}


def series() -> dict[str, np.ndarray]:
    """Return noisy waves, `signal` float32 [ROWS, 48, 8], and their frequencies, `label` int32 [ROWS]."""
    rng = np.random.default_rng(SEED)
    label = rng.integers(0, 10, ROWS).astype(np.int32)
    phase = rng.random((ROWS, 1, 8)) + (label[:, None, None] + 1) * np.arange(48)[:, None] / 48
    noise = rng.standard_normal((ROWS, 48, 8)) / 4
    return {"signal": (np.sin(2 * np.pi * phase) + noise).astype(np.float32), "label": label}
