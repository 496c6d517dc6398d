"""The state of a training: variables, optimizer state, step, loss scale and model state."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import strategies.trees as trees
from strategies.loss_scaling import LossScale
from strategies.typing import Leaf, OptimizerState, Tree, Variables

if TYPE_CHECKING:
    from strategies.holding import HeldArrays

trees.register_dataclass(LossScale, data_fields=["scale", "good_steps", "skipped"], meta_fields=[])


@partial(
    trees.register_dataclass,
    data_fields=["variables", "optimizer_state", "loss_scale", "residuals", "model_state"],
    meta_fields=["step", "held"],
)
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes.

    Attributes:
        variables: Pytree of arrays with the same bits on every instance.
        optimizer_state: State of the optimizer; if it is sharded, this instance's part.
        step: Number of steps so far.
        loss_scale: Scale of the next loss; None without loss scaling.
        residuals: Rounding errors of the local replicas' int8 gradients, carried over to the next step. Each variable
            has a float32 array with the replicas along its first axis. None if gradients are not quantised.
        model_state: Pytree of arrays that every batch changes without gradients, or None. It has the same bits on every
            instance. A leaf that each replica has of its own has the local replicas along its first axis instead.
        held: Copies of another instance's parts, and the replicas for which parts are cut; None if no part would be
            lost with an instance, or the job does not go on after a loss.
    """

    variables: Variables
    optimizer_state: OptimizerState
    step: int
    loss_scale: LossScale | None = None
    residuals: Tree = None
    model_state: Tree = None
    held: HeldArrays | None = None

    def __post_init__(self) -> None:
        _alive[id(self)] = self


_alive: weakref.WeakValueDictionary[int, TrainState] = weakref.WeakValueDictionary()


def is_trained(leaf: Leaf) -> bool:
    """Return whether an array is part of a state that the program still holds, such as a variable or a moving mean."""
    alive = [(state.variables, state.optimizer_state, state.model_state) for state in list(_alive.values())]
    return any(leaf is other for other in trees.leaves(alive))


def check_state(state: object) -> None:
    """Check the state that is given to a step.

    Raises:
        TypeError: It is not a `TrainState`.
        ValueError: A step has used it up.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the state is of type {type(state).__name__}; give the result of trainer.init, and later the result of "
            "the previous step: state, metrics = trainer.step(state, batch)"
        )
    if are_used_up(state.variables):
        raise ValueError(
            f"this state was used up by step {state.step}; rebind it: state, metrics = trainer.step(state, batch)"
        )


def are_used_up(variables: Variables) -> bool:
    """Return whether a step has reused the memory of these variables for new ones."""
    return any([leaf.is_deleted() for leaf in trees.leaves(variables) if hasattr(leaf, "is_deleted")])  # in every step
