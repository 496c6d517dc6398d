"""The state of a training: variables, optimizer state, step and loss scale."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import jax

from strategies.loss_scaling import LossScale
from strategies.typing import Leaf, OptimizerState, Tree, Variables

jax.tree_util.register_dataclass(LossScale, data_fields=["scale", "good_steps", "skipped"], meta_fields=[])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["variables", "optimizer_state", "loss_scale", "residuals", "model_state"],
    meta_fields=["step"],
)
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes.

    Attributes:
        variables: a pytree of arrays, the same bits on every instance.
        optimizer_state: what the optimizer keeps; of sharded state this instance's part.
        step: how many steps were made.
        loss_scale: of the next step; None without loss scaling.
        residuals: what int8 gradients of the local replicas have lost so far, for each variable float32 with the
            replicas one after another along the first axis; None where gradients are not quantised.
        model_state: what changes with every batch and is not trained: a pytree of arrays, the same bits on every
            instance, but for leaves of which each replica has its own: these have the local replicas along a first
            axis. None where the loss function has none.
    """

    variables: Variables
    optimizer_state: OptimizerState
    step: int
    loss_scale: LossScale | None = None
    residuals: Tree = None
    model_state: Tree = None

    def __post_init__(self) -> None:
        _alive[id(self)] = self


_alive: weakref.WeakValueDictionary[int, TrainState] = weakref.WeakValueDictionary()


def is_trained(leaf: Leaf) -> bool:
    """Return whether an array belongs to a state that the program still has: a variable, say, or a moving mean."""
    trees = [(state.variables, state.optimizer_state, state.model_state) for state in list(_alive.values())]
    return any(leaf is other for other in jax.tree.leaves(trees))
