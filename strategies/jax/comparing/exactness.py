"""Whether two ways to compute the same have the same bits: tried out, not assumed.

XLA fuses and contracts what lies in one program; cut elsewhere, some models round differently (seen with attention and
dropout). Ways are compared for what is at hand, and for random values such as no training begins with, so that equal
bits mean something: a last layer of zeros makes all other gradients zero, and a learning rate that warms up from zero
changes no variable, and programs that round differently look alike then.
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
"""Of each local replica, with the loss and the metrics before them, and what it keeps behind."""
ComputeGradients = Callable[[TrainState, Batch], OfReplicas]


def probe_of(state: TrainState, batch: Batch, seed: int) -> tuple[TrainState, Tree]:
    """A state with random variables, and a random batch, like those that are given."""
    return replace(state, variables=variables_like(state.variables, seed)), batch_like(batch, seed)


def variables_like(variables: Variables, seed: int) -> Tree:
    """Random variables of the same shapes and dtypes, where the given ones lie; of unit variance for each output.

    Integers, which are not trained, are the same.
    """
    return _like(variables, seed, lambda leaf: max(1, math.prod(leaf.shape[:-1])))


def batch_like(batch: Batch, seed: int) -> Tree:
    """A batch with other floating-point numbers, of unit variance; integers, such as labels, are the same."""
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
    """Whether two ways to compute gradients have the same bits here, for a state and a batch and for random ones."""
    cases = (probe_of(state, batch, seed), (state, batch))
    return all(are_same(itertools.chain(*one(*case)), itertools.chain(*other(*case))) for case in cases)


def are_same(one: Any, other: Any) -> bool:
    """Whether arrays, or the leaves of two trees, are the same to the last bit."""
    pairs = zip(jax.tree.leaves(list(one)), jax.tree.leaves(list(other)), strict=True)
    return all(np.asarray(mine).tobytes() == np.asarray(theirs).tobytes() for mine, theirs in pairs)


def is_so_everywhere(is_so: bool, communicator: Communicator, what: str) -> bool:
    """Whether it is so on all instances; a collective call."""
    flag = np.array([is_so], np.int8)
    communicator.all_reduce(flag, "min", name=what)
    return bool(flag[0])
