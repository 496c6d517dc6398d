"""The update of a step by mean gradients that lie in flat buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from strategies.exchange.flat import FlatLayout
from strategies.jax.gradients.replica_program import ReplicaProgram
from strategies.jax.programs.program import jit
from strategies.jax.updates.update import VariableUpdate, WholeStateUpdate
from strategies.typing import Gradients, Leaf, OptimizerState, Tree, Variables

Unpacked: TypeAlias = tuple[Gradients, jax.Array, jax.Array]
"""Mean gradients like the trained variables, the tail, and control words with the mean loss and weight."""


class FlatUpdate:
    """The update of the variables by mean gradients in flat buffers.

    If every instance has all of the optimizer state, one program unpacks the buffers and updates the variables.
    Otherwise the update is a program of its own.

    Args:
        program: Computation of a replica, whose results are in the buffers.
        update: Update of the variables.
        layout: Layout of the buffers.
        structure: Structure of the trained variables.
        scales: Whether the tail says if the step may be applied.
    """

    def __init__(
        self, program: ReplicaProgram, update: VariableUpdate, layout: FlatLayout, structure: Tree, scales: bool
    ) -> None:
        self._program = program
        self._update = update
        self._layout = layout
        self._structure = structure
        self._scales = scales
        self._unpack = jit(self._unpacked)
        self._tail = jit(lambda buffer: program.places.weighted(layout.tail_view([buffer])))
        self._state = jit(lambda buffers: layout.views(buffers)[program.num_gradients :])
        self._at_once = None
        if isinstance(update, WholeStateUpdate) and not update.has_parts:
            self._whole = update
            self._at_once = update.in_turn(jit(self._updated, donate_argnums=(0, 1)))

    def unpacked(self, buffers: Sequence[jax.Array], control: Leaf) -> Unpacked:
        """Return the contents of the buffers, except means of the model state."""
        found: Unpacked = self._unpack(buffers, control)
        return found

    def tail_of(self, buffer: jax.Array) -> jax.Array:
        """Return the tail that lies in the first buffer, with weighted means if losses have weights."""
        found: jax.Array = self._tail(buffer)
        return found

    def state_means(self, buffers: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the means of leaves of the model state."""
        found: list[jax.Array] = self._state(buffers)
        return found

    def apply(
        self,
        variables: Variables,
        optimizer_state: OptimizerState,
        buffers: Sequence[jax.Array],
        control: Leaf,
    ) -> tuple[Variables, OptimizerState]:
        """Return new variables and optimizer state; the old ones are used up.

        With loss scaling nothing changes if a gradient is not finite. The host has to wait for this check only if the
        optimizer state is cut into parts on several instances.

        Args:
            variables: Trained variables.
            optimizer_state: Optimizer state of these variables.
            buffers: Buffers with the means.
            control: Control words, see `control_words`.
        """
        if self._at_once is not None:
            state = self._whole.on_device(optimizer_state)
            variables, state = self._at_once(variables, state, buffers, control)
            return variables, self._whole.offloaded(state)
        means, tail, control = self.unpacked(buffers, control)
        if self._scales and not self._is_finite(np.asarray(tail)):
            return variables, optimizer_state
        return self._update.apply(variables, optimizer_state, means, control)

    def _updated(
        self, variables: Variables, optimizer_state: OptimizerState, buffers: Sequence[jax.Array], control: jax.Array
    ) -> tuple[Variables, OptimizerState]:
        means, tail, control = self._unpacked(buffers, control)
        trained, state, _ = self._whole.traced(variables, optimizer_state, means, control)
        if not self._scales:
            return trained, state
        is_finite = self._is_finite(tail)
        before = variables, optimizer_state
        trained, state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), (trained, state), before)
        return trained, state

    def _is_finite(self, tail: Tree) -> Tree:
        return tail[self._program.places.finite] == 0

    def _unpacked(self, buffers: Sequence[jax.Array], control: jax.Array) -> Unpacked:
        # Behind a barrier, as if each were an argument: if XLA fused the cut into the update, it could round otherwise.
        leaves, tail = jax.lax.optimization_barrier((self._layout.views(buffers), self._layout.tail_view(buffers)))
        means = jax.tree.unflatten(self._structure, leaves[: self._program.num_gradients])
        control = self._program.places.with_means(jnp.asarray(control), self._program.places.weighted(tail))
        return means, tail, control
