"""Replicated tensor sharding for optimizers that look across elements: their state is put together for each update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from strategies.exchange.shards import Shards
from strategies.programs.program import jit
from strategies.replicas.replicas import Replicas
from strategies.replicas.shards import PartOfArray, shards_of, take
from strategies.typing import Gradients, Leaf, OptimizerState, Tree, Variables
from strategies.updates.optimizers import AnyOptimizer
from strategies.updates.sharded_update import AcrossElementsError, ShardedStateUpdate
from strategies.updates.update import UpdateSettings, VariableUpdate, WholeStateUpdate

logger = logging.getLogger(__name__)


@final
class GatheredStateUpdate(VariableUpdate):
    """Between updates each instance keeps (its replicas / R) of the optimizer state; it has all of it during one.

    The program of the update is that of a whole state, so the bits are the same for every optimizer. Instances send
    their parts of the state to each other before each update.

    Args:
        replicas: see `VariableUpdate`.
        optimizer: see `VariableUpdate`; any.
        settings: see `VariableUpdate`; smaller arrays than its `min_elements` are whole on every instance.
    """

    def __init__(self, replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings) -> None:
        super().__init__(replicas, optimizer, settings)
        self._update = WholeStateUpdate(replicas, optimizer, replace(settings, offloads_state=False))
        self._shards = shards_of(replicas, settings.min_elements)
        self._first = np.int32(replicas.local_replicas.start)
        self._cut = self._in_turn(jit(self._parts))
        self._shapes: Tree = None  # of the whole optimizer state

    @property
    def is_sharded(self) -> bool:
        """See `VariableUpdate`: yes."""
        return True

    @property
    def mean_shards(self) -> Shards | None:
        """See `VariableUpdate`: it takes them whole."""
        return None

    def init(self, variables: Variables) -> OptimizerState:
        """See `VariableUpdate`."""
        return self.adopt(variables, self._update.init(variables))

    def init_shapes(self, variables: Variables) -> OptimizerState:
        """See `VariableUpdate`."""
        self._shapes = self._update.init_shapes(variables)
        return jax.eval_shape(self._parts, self._shapes, self._first)

    def lowered(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> Mapping[str, jax.stages.Lowered]:
        """See `VariableUpdate`: of a state that is put together."""
        return self._update.lowered(variables, self._shapes, means, control)

    def adopt(self, variables: Variables, optimizer_state: OptimizerState) -> OptimizerState:
        """See `VariableUpdate`."""
        state = self._update.adopt(variables, optimizer_state)
        self._shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        return self.offloaded(self._cut(state, self._first))

    def apply(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> tuple[Variables, OptimizerState]:
        """See `VariableUpdate`; a collective call."""
        state = self._gathered(self.on_device(optimizer_state))
        variables, state = self._update.apply(variables, state, means, control)
        return variables, self.offloaded(self._cut(state, self._first))

    def wait(self) -> None:
        """See `VariableUpdate`."""
        self._update.wait()

    def equations(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> core.ClosedJaxpr:
        """See `VariableUpdate`."""
        return self._update.equations(variables, self._shapes, means, control)

    def traced(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: jax.Array
    ) -> tuple[Variables, OptimizerState, jax.Array]:
        """See `VariableUpdate`: where this instance drives all replicas."""
        state = jax.tree.map(
            lambda leaf, shape: self._shards.join(leaf, shape) if self._is_cut(shape) else leaf,
            optimizer_state,
            self._shapes,
        )
        variables, state, token = self._update.traced(variables, state, means, control)
        return variables, self._parts(state, jnp.int32(0)), token

    def whole(self, optimizer_state: OptimizerState) -> OptimizerState:
        """See `VariableUpdate`."""
        return jax.tree.map(
            lambda leaf, shape: PartOfArray(leaf, shape, self._shards, self._replicas) if self._is_cut(shape) else leaf,
            optimizer_state,
            self._shapes,
        )

    def _gathered(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Return all of the state, on the device of the variables."""
        leaves, structure = jax.tree.flatten(self.whole(optimizer_state))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, PartOfArray):
                array = leaf.gather(f"optimizer state/{number}")
                leaves[number] = jax.device_put(array, self._replicas.variables_device, may_alias=False)
        return jax.tree.unflatten(structure, leaves)

    def _parts(self, state: OptimizerState, first: jax.Array) -> OptimizerState:
        return jax.tree.map(lambda leaf: take(self._shards, leaf, first) if self._is_cut(leaf) else leaf, state)

    def _is_cut(self, leaf: Leaf) -> bool:
        return bool(jnp.issubdtype(leaf.dtype, np.number)) and self._shards.divides(leaf)


@final
class ShardedByAnyUpdate(VariableUpdate):
    """Sharded optimizer state: `ShardedStateUpdate` where the optimizer allows it, `GatheredStateUpdate` otherwise."""

    def __init__(self, replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings) -> None:
        super().__init__(replicas, optimizer, settings)
        self._chosen: VariableUpdate = ShardedStateUpdate(replicas, optimizer, settings)

    @property
    def is_sharded(self) -> bool:
        """See `VariableUpdate`: yes."""
        return True

    @property
    def mean_shards(self) -> Shards | None:
        """See `VariableUpdate`."""
        return self._chosen.mean_shards

    def init(self, variables: Variables) -> OptimizerState:
        """See `VariableUpdate`; chooses."""
        return self._choosing(lambda update: update.init(variables))

    def init_shapes(self, variables: Variables) -> OptimizerState:
        """See `VariableUpdate`; chooses."""
        return self._choosing(lambda update: update.init_shapes(variables))

    def lowered(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> Mapping[str, jax.stages.Lowered]:
        """See `VariableUpdate`."""
        return self._chosen.lowered(variables, optimizer_state, means, control)

    def adopt(self, variables: Variables, optimizer_state: OptimizerState) -> OptimizerState:
        """See `VariableUpdate`; chooses."""
        return self._choosing(lambda update: update.adopt(variables, optimizer_state))

    def _choosing(self, begin: Callable[[VariableUpdate], OptimizerState]) -> OptimizerState:
        try:
            return begin(self._chosen)
        except AcrossElementsError as error:
            logger.info("%s: its state is in parts between updates, and put together for each of them", error)
            self._chosen = GatheredStateUpdate(self._replicas, self._optimizer, self._settings)
            return begin(self._chosen)

    def apply(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> tuple[Variables, OptimizerState]:
        """See `VariableUpdate`; a collective call."""
        return self._chosen.apply(variables, optimizer_state, means, control)

    def wait(self) -> None:
        """See `VariableUpdate`."""
        self._chosen.wait()

    def equations(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> core.ClosedJaxpr:
        """See `VariableUpdate`."""
        return self._chosen.equations(variables, optimizer_state, means, control)

    def traced(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: jax.Array
    ) -> tuple[Variables, OptimizerState, jax.Array]:
        """See `VariableUpdate`: where this instance drives all replicas."""
        return self._chosen.traced(variables, optimizer_state, means, control)

    def whole(self, optimizer_state: OptimizerState) -> OptimizerState:
        """See `VariableUpdate`."""
        return self._chosen.whole(optimizer_state)


def update_for(replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings) -> VariableUpdate:
    """Return the update with whole or with sharded optimizer state, as the settings want it."""
    return (ShardedByAnyUpdate if settings.shards_state else WholeStateUpdate)(replicas, optimizer, settings)
