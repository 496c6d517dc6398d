"""Many steps in one program, where one instance drives the only replica.

XLA compiles the body of a loop otherwise than a program of its own: some gradients of convolutions differ in their last
bits (seen on CPU), so `Trainer` compares before it relies on this. With several replicas there is no such program: one
for all of them would be compiled otherwise than those of single replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strategies.gradients.replica_program import STEP, ReplicaProgram, control_words, with_loss
from strategies.programs.program import jit
from strategies.typing import Batch, OptimizerState, Tree, Variables
from strategies.updates.update import VariableUpdate


class FusedSteps:
    """Runs steps of one replica one after another, without returning to Python in between.

    Gradients are computed and applied with the same operations as in single steps.

    Args:
        program: what a replica computes.
        update: of the variables.
    """

    def __init__(self, program: ReplicaProgram, update: VariableUpdate) -> None:
        self._program = program
        self._update = update
        self._run = jit(self._steps, donate_argnums=(0, 1))

    def __call__(
        self, variables: Variables, optimizer_state: OptimizerState, batches: Sequence[Batch], step: int
    ) -> tuple[Variables, OptimizerState, jax.Array]:
        """Make one step with each of the batches.

        Args:
            variables: on the device; used up.
            optimizer_state: likewise.
            batches: of equal shapes.
            step: the number of the first one.

        Returns:
            New variables and optimizer state, and the tails of all steps, float32 [steps, tail size].
        """
        results: tuple[Variables, OptimizerState, jax.Array] = self._run(
            variables, optimizer_state, tuple(batches), np.int32(0), control_words(step, False, 1.0)
        )
        return results

    def has_effects(self, variables: Variables, optimizer_state: OptimizerState, batches: Sequence[Batch]) -> bool:
        """Whether the program calls back into Python."""
        words = control_words(0, False, 1.0)
        traced = jax.make_jaxpr(self._steps)(variables, optimizer_state, tuple(batches), np.int32(0), words)
        return bool(traced.effects)

    def last_gradients(self, variables: Variables, batches: Sequence[Batch], step: int) -> list[np.ndarray]:
        """The tail and the gradients for the last of the batches, computed in such a loop; for comparison.

        The variables stay as they are.
        """
        words = control_words(step, False, 1.0)
        found = jit(self._gradients_in_loop)(variables, tuple(batches), np.int32(0), words)
        return [np.asarray(leaf) for leaf in found]

    def _gradients_in_loop(
        self, variables: Variables, batches: Sequence[Batch], index: jax.Array, control: jax.Array
    ) -> Sequence[jax.Array]:
        def step(_: Any, batch: Batch) -> tuple[Tree, None]:
            return jax.lax.optimization_barrier(self._program(variables, batch, index, control)), None

        of_gradients = [jnp.zeros(result.shape, result.dtype) for result in self._program.results]
        zeros = (jnp.zeros(self._program.tail_size, jnp.float32), *of_gradients)
        last: Sequence[jax.Array] = jax.lax.scan(step, zeros, _stacked(batches))[0]
        return last

    def _steps(
        self,
        variables: Variables,
        optimizer_state: OptimizerState,
        batches: Sequence[Batch],
        index: jax.Array,
        control: jax.Array,
    ) -> tuple[Variables, OptimizerState, jax.Array]:
        def step(carried: Tree, batch: Batch) -> tuple[Tree, jax.Array]:
            variables, optimizer_state, control = carried
            tail, *gradients = self._program(variables, batch, index, control)
            # What single steps compute in programs of their own must not be fused here either.
            tail, *gradients = jax.lax.optimization_barrier((tail, *gradients))
            trained = self._program.trainable.pick(variables)
            means = jax.tree.unflatten(jax.tree.structure(trained), gradients)
            words = with_loss(control, tail)
            trained, optimizer_state, _ = self._update.traced(trained, optimizer_state, means, words)
            variables = self._program.trainable.put(variables, trained)
            return (*jax.lax.optimization_barrier((variables, optimizer_state)), control.at[STEP].add(1)), tail

        (variables, optimizer_state, _), tails = jax.lax.scan(
            step, (variables, optimizer_state, control), _stacked(batches)
        )
        return variables, optimizer_state, tails


def _stacked(batches: Sequence[Batch]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
