"""Replicated tensor sharding for optimizers that look across elements: their state is put together for each update."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from strategies.replicas.replicas import Replicas
from strategies.replicas.shards import PartOfArray, ShardedTree, shards_of
from strategies.typing import Gradients, OptimizerState, Variables
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
        variables: those that are trained; shapes and dtypes are enough.
    """

    def __init__(
        self, replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings, variables: Variables
    ) -> None:
        super().__init__(replicas, optimizer, settings)
        self._update = WholeStateUpdate(replicas, optimizer, replace(settings, offloads_state=False))
        shards, shapes = shards_of(replicas, settings.min_elements), jax.eval_shape(self._optimizer.init, variables)
        is_cut = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, np.number) and shards.divides(leaf), shapes)
        self._state_shards = ShardedTree(replicas, shards, shapes, is_cut)
        self._take = self._state_shards.take
        self._cut = self._compiled(self._take)
        self._shapes = shapes

    def begun(self, variables: Variables, first: jax.Array) -> OptimizerState:
        """See `VariableUpdate`."""
        # Behind a barrier: if XLA fused it with the cut, it could round otherwise.
        return self._take(jax.lax.optimization_barrier(self._optimizer.init(variables)), first)

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

    def programs(
        self, variables: Variables, optimizer_state: OptimizerState, means: Gradients, control: np.ndarray
    ) -> Mapping[str, jax.stages.Traced]:
        """See `VariableUpdate`: of a state that is put together."""
        return self._update.programs(variables, self._shapes, means, control)

    def _gathered(self, optimizer_state: OptimizerState) -> OptimizerState:
        """Return all of the state, on the device of the variables."""
        leaves, structure = jax.tree.flatten(self.whole(optimizer_state))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, PartOfArray):
                array = leaf.gather(f"optimizer state/{number}")
                leaves[number] = jax.device_put(array, self._replicas.variables_device, may_alias=False)
        return jax.tree.unflatten(structure, leaves)


def update_for(
    replicas: Replicas, optimizer: AnyOptimizer, settings: UpdateSettings, variables: Variables
) -> VariableUpdate:
    """Return the update of such variables: with whole optimizer state, or in parts as far as the optimizer allows it.

    Args:
        replicas: whose variables are updated. The part of the only replica is the whole state.
        optimizer: an optax gradient transformation, or a `StepOptimizer`.
        settings: of the update.
        variables: those that are trained; shapes and dtypes are enough.
    """
    if not settings.shards_state or replicas.num_replicas_in_sync == 1:
        return WholeStateUpdate(replicas, optimizer, settings)
    try:
        return ShardedStateUpdate(replicas, optimizer, settings, variables)
    except AcrossElementsError as error:
        logger.info("%s: its state is in parts between updates, and put together for each of them", error)
        return GatheredStateUpdate(replicas, optimizer, settings, variables)
