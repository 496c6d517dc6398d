"""Trials whether two ways to compute the same value give the same bits.

XLA fuses and contracts operations inside one program. If a model is cut elsewhere, it may round differently (seen with
attention and dropout). Both ways are compared for the given values, and for random values. At the start of a training
equal bits would mean little. A last layer of zeros makes all other gradients zero, and a learning rate that warms up
from zero changes no variable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import Communicator
from strategies.train_state import TrainState
from strategies.typing import Batch, Leaf, Tree, Variables

OfReplicas = Sequence[Sequence[np.ndarray]]
"""For each local replica: the loss and the metrics, its gradients, and the values that it keeps."""
ComputeGradients = Callable[[TrainState, Batch], OfReplicas]


def probe_of(state: TrainState, batch: Batch, seed: int) -> tuple[TrainState, Tree]:
    """Return a state with random variables, and a random batch, with the shapes and dtypes of the given ones."""
    return replace(state, variables=variables_like(state.variables, seed)), batch_like(batch, seed)


def variables_like(variables: Variables, seed: int) -> Tree:
    """Return random variables of the same shapes, dtypes and devices, scaled so that outputs have unit variance.

    Integers, which are not trained, are kept.
    """
    return _like(variables, seed, lambda leaf: max(1, math.prod(leaf.shape[:-1])))


def batch_like(batch: Batch, seed: int) -> Tree:
    """Return a batch with random floating-point numbers of unit variance; integers, such as labels, are kept."""
    return _like(batch, seed, lambda leaf: 1)


def _like(tree: Tree, seed: int, inputs_of: Callable[[Leaf], int]) -> Tree:
    random = np.random.default_rng(seed)

    def draw(leaf: Leaf) -> Leaf:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        drawn = (random.standard_normal(leaf.shape) / math.sqrt(inputs_of(leaf))).astype(leaf.dtype)
        return jax.device_put(drawn, leaf.sharding) if isinstance(leaf, jax.Array) else drawn

    return jax.tree.map(draw, tree)


def have_same_gradients(
    one: ComputeGradients, other: ComputeGradients, state: TrainState, batch: Batch, seed: int
) -> bool:
    """Return whether two ways to compute gradients have the same bits for a state and batch, and for random ones."""
    cases = (probe_of(state, batch, seed), (state, batch))
    return all(are_same(itertools.chain(*one(*case)), itertools.chain(*other(*case))) for case in cases)


def are_same(one: Any, other: Any) -> bool:
    """Return whether arrays, or the leaves of two trees, are the same to the last bit."""
    pairs = zip(jax.tree.leaves(list(one)), jax.tree.leaves(list(other)), strict=True)
    return all(np.asarray(mine).tobytes() == np.asarray(theirs).tobytes() for mine, theirs in pairs)


def is_so_everywhere(is_so: bool, communicator: Communicator, what: str) -> bool:
    """Return whether `is_so` is true on all instances. Collective."""
    flag = np.array([is_so], np.int8)
    communicator.all_reduce(flag, "min", name=what)
    return bool(flag[0])
