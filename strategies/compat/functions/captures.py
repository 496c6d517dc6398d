"""Gradients that stages capture by tag and that reach the optimizer like the gradients of variables.

For each marked array, a handle of the same shape is trained along with the variables. Its value never changes, and its
gradient is the gradient of the marked array. It is accumulated and averaged like all others, and the optimizer receives
it as `captured_grads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from strategies.jax.gradients.accumulation import accumulator_dtypes
from strategies.jax.programs.gradient_capture import with_handles
from strategies.jax.replicas.shards import PartOfArray
from strategies.jax.updates.optimizers import AnyOptimizer, OptaxOptimizer
from strategies.pipelines.running.micro_batch import get_current_iteration_counter
from strategies.train_state import TrainState
from strategies.typing import AccumulationDtype, Function, OptimizerState, Tree, Variables


class _Nameless:
    """An empty part of the path of a variable, so that variables keep the names that their program knows."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class CapturingVariables:
    """Variables, and handles by tag."""

    variables: Variables
    handles: Mapping[str, Tree]

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[object, Tree], ...], None]:
        """Return the children with their keys, for JAX's `register_pytree_with_keys_class`."""
        return ((_Nameless(), self.variables), (jax.tree_util.GetAttrKey("captured"), self.handles)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Variables, Mapping[str, Tree]]) -> CapturingVariables:
        """Make an object from its children, for JAX's `register_pytree_with_keys_class`."""
        return cls(*children)


class CapturingState(NamedTuple):
    """The state of an optimizer, and the captured gradients of its last update."""

    optimizer: OptimizerState
    captured: Mapping[str, jax.Array]


@dataclass(frozen=True)
class Captures:
    """The gradients that a pipeline captures. By default none, and then every method returns its argument unchanged.

    Attributes:
        shapes: Shapes of the marked arrays, by tag.
        count: Number of micro-batches.
        accumulates: Whether gradients of micro-batches are accumulated; if not, the optimizer gets those of each
            micro-batch, [count, *shape].
        is_sum: Whether gradients of micro-batches are added up instead of averaged.
        dtype: Dtype of accumulators.
    """

    shapes: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    count: int = 1
    accumulates: bool = True
    is_sum: bool = True
    dtype: AccumulationDtype = None

    def extended(self, variables: Variables) -> Variables:
        """Return the trained tree: the variables, and an array of zeros for each captured gradient."""
        if not self.shapes:
            return variables
        lead = () if self.accumulates else (self.count,)
        handles = {tag: np.zeros((*lead, *shape.shape), shape.dtype) for tag, shape in self.shapes.items()}
        return CapturingVariables(variables, handles)

    def trainable(self, trainable: Tree) -> Tree:
        """Return the `trainable` of the trained tree, given the `trainable` of the variables."""
        is_tree = trainable is not None and not callable(trainable)
        return CapturingVariables(trainable, dict.fromkeys(self.shapes, True)) if self.shapes and is_tree else trainable

    def loss(self, loss_fn: Function) -> Function:
        """Return the loss function of the trained tree, given that of the variables."""
        if not self.shapes:
            return loss_fn

        def extended(trained: CapturingVariables, *arguments: Tree) -> Tree:
            number = get_current_iteration_counter()
            handles = trained.handles
            if not self.accumulates:
                handles = {tag: handle[number] for tag, handle in handles.items()}
            return with_handles(loss_fn)(handles, trained.variables, *arguments)

        return extended

    def optimizer(self, optimizer: optax.GradientTransformation) -> AnyOptimizer:
        """Return the optimizer of the trained tree, which passes `captured_grads` on if `optimizer` takes arguments.

        Handles have other shapes than variables, so parts of the two would not match; the optimizer needs whole arrays.
        """
        if not self.shapes:
            return optimizer
        own = optax.with_extra_args_support(optimizer)

        def init(trained: CapturingVariables) -> CapturingState:
            dtypes = accumulator_dtypes(trained.handles, self.dtype)
            leaves, structure = jax.tree.flatten(trained.handles)
            zeros = [jnp.zeros(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
            return CapturingState(own.init(trained.variables), jax.tree.unflatten(structure, zeros))

        def update(
            gradients: CapturingVariables,
            state: CapturingState,
            trained: CapturingVariables | None = None,
            **extra: object,
        ) -> tuple[CapturingVariables, CapturingState]:
            captured = gradients.handles
            if not self.accumulates and not self.is_sum:
                captured = jax.tree.map(lambda leaf: leaf * self.count, captured)
            variables = None if trained is None else trained.variables
            changes, new = own.update(gradients.variables, state.optimizer, variables, captured_grads=captured, **extra)
            still = jax.tree.map(jnp.zeros_like, gradients.handles)
            return CapturingVariables(changes, still), CapturingState(new, captured)

        return OptaxOptimizer(optax.GradientTransformationExtraArgs(init, update), needs_whole=True)

    def shown(self, state: TrainState) -> TrainState:
        """Return a state with the variables alone, as the user's program knows them."""
        return replace(state, variables=state.variables.variables) if self.shapes else state

    def of(self, state: TrainState) -> dict[str, np.ndarray]:
        """Return the gradients captured for the last update. Collective if the optimizer state is sharded.

        Args:
            state: State with a `PartOfArray` for each array of which this instance has only a part.
        """
        captured = state.optimizer_state.captured if self.shapes else {}
        return {tag: _all_of(captured[tag], f"the captured gradient {tag}") for tag in sorted(captured)}


def _all_of(array: PartOfArray | jax.Array, name: str) -> np.ndarray:
    return array.gather(name) if isinstance(array, PartOfArray) else np.array(array)
