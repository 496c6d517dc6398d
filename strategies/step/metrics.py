"""What a step tells about itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from collectives.instruments import Instruments, is_seen


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

    def loss_at_hand(self) -> float | None:
        """The loss, unless it is still being computed, is gone, or there is none."""
        means = self.means
        if not self.names:
            return None
        if isinstance(means, jax.Array) and (means.is_deleted() or not means.is_ready()):  # type: ignore[attr-defined]
            return None
        return float(np.asarray(means)[0])

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"


def tell_end(instruments: Instruments, batch: Any, metrics: Metrics, steps: int = 1) -> None:
    """Tell who looks that a step has ended well.

    Args:
        instruments: see it.
        batch: of the local replicas.
        metrics: of the step.
        steps: how many were made in one program, each with such a batch.
    """
    waits, counts = is_seen(instruments.step_ends), is_seen(instruments.steps_made)
    if not waits and not counts:
        return
    rows = steps * max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())), default=0)
    if counts:
        instruments.steps_made(steps, rows, metrics.loss_at_hand)
    if waits:
        instruments.step_ends(rows, float(metrics.means[0]) if metrics.names else float("nan"))
