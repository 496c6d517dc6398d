"""What a step tells about itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import numpy as np


class Metrics(Mapping[str, float]):
    """Means over all replicas, under "loss" and the names that the loss function gave.

    Attributes:
        names: "loss", and those that the loss function gave.
        means: float32, in the order of the names; there may be more behind them. An array of JAX's may still be being
            computed: whoever reads a metric waits for it.
    """

    def __init__(self, names: tuple[str, ...], means: np.ndarray | jax.Array) -> None:
        self.names = names
        self.means: np.ndarray | jax.Array = means

    def __getitem__(self, name: str) -> float:
        try:
            position = self.names.index(name)
        except ValueError:
            raise KeyError(name) from None
        if not isinstance(self.means, np.ndarray):  # an element of an array of JAX's is a program of its own
            self.means = np.asarray(self.means)
        return float(self.means[position])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"
