"""Training of a model of the zoo."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

import strategies
from strategies.jax.replicas.variables import PartOfArray
from zoo.model import Model
from zoo.optimizers import OPTIMIZERS


def fingerprints(
    strategy: strategies.Strategy, model: Model, optimizer: str = "momentum", steps: int = 5, **options: Any
) -> list[str]:
    """Return the fingerprints of variables and whole optimizer state after each step.

    Momentum's first state is the mean gradient itself: variables might lose a differing last bit.

    Args:
        strategy: The strategy with the replicas.
        model: The model to train.
        optimizer: One of OPTIMIZERS.
        steps: The number of steps.
        options: Options of the trainer.
    """
    count = options.get("gradient_accumulation_count", 1)
    dataset = strategy.distribute_dataset(model.data(), model.rows, seed=3, gradient_accumulation_count=count)
    trainer = strategies.Trainer(strategy, model.loss_fn, OPTIMIZERS[optimizer], seed=4, **{**model.options, **options})
    state, found = trainer.init(model.variables()), []
    for batch in itertools.islice(dataset.epoch(0), steps):
        state, metrics = trainer.step(state, batch)
        found.append(strategies.fingerprint((state.variables, _whole(trainer, state))))
    assert 0 < metrics["loss"] < 20, "training has gone astray, and what is compared says little"
    return found


def _whole(trainer: strategies.Trainer, state: strategies.TrainState) -> list[np.ndarray]:
    """Return the optimizer state without sharding."""
    leaves = jax.tree.leaves(trainer.whole(state).optimizer_state)
    return [leaf.gather("state") if isinstance(leaf, PartOfArray) else np.asarray(leaf) for leaf in leaves]
