"""Several steps in one execution, if that has the same bits as one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strategies.fused_steps import FusedSteps
from strategies.metrics import Metrics
from strategies.probing import batch_like, variables_like
from strategies.replica_program import ReplicaProgram
from strategies.train_state import TrainState
from strategies.updates import Update

logger = logging.getLogger(__name__)

Steps = Callable[[TrainState, Sequence[Any]], tuple[TrainState, Metrics]]


class Executions:
    """Makes steps in one program, after it has compared that with single steps.

    Args:
        update: of the variables.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        self._programs: dict[tuple[int, int], FusedSteps | None] = {}  # None where it has other bits

    def make(
        self,
        program: ReplicaProgram,
        state: TrainState,
        batches: Sequence[Any],
        singly: Steps,
        gradients_of: Callable[[TrainState, Any], list[list[np.ndarray]]],
    ) -> tuple[TrainState, Metrics]:
        """A step with each of the batches; the state is used up.

        Args:
            program: what a replica computes, for batches of this shape.
            state: see `Trainer.step`.
            batches: of equal shapes.
            singly: makes the steps one by one.
            gradients_of: the gradients of each replica, for a state and a batch, as single steps compute them.
        """
        key = id(program), len(batches)
        if key not in self._programs:
            fused = FusedSteps(program, self._update)
            if fused.has_effects(state.variables, self._update.on_device(state.optimizer_state), batches):
                logger.info("steps are made one by one: the loss function calls back into Python, as feeds do")
                self._programs[key] = None
                return singly(state, batches)
            seed = state.step
            probe = replace(state, variables=variables_like(state.variables, seed))
            others = [batch_like(batch, seed + number) for number, batch in enumerate(batches)]
            wanted = gradients_of(probe, others[-1])[-1]
            in_loop = fused.last_gradients(probe.variables, others, probe.step)
            is_same = all(one.tobytes() == other.tobytes() for one, other in zip(wanted, in_loop, strict=True))
            on_device = replace(state, optimizer_state=self._update.on_device(state.optimizer_state))
            copy = jax.tree.map(jnp.copy, on_device)
            single, metrics = singly(state, batches)
            is_same = is_same and _have_same_bits(single, self._make(fused, program, copy, batches)[0])
            if not is_same:
                logger.info("steps are made one by one: in one program they would have other bits")
            self._programs[key] = fused if is_same else None
            return single, metrics
        found = self._programs[key]
        return singly(state, batches) if found is None else self._make(found, program, state, batches)

    def _make(
        self, fused: FusedSteps, program: ReplicaProgram, state: TrainState, batches: Sequence[Any]
    ) -> tuple[TrainState, Metrics]:
        optimizer_state = self._update.on_device(state.optimizer_state)
        variables, optimizer_state, tails = fused(state.variables, optimizer_state, batches, state.step)
        after = replace(
            state,
            variables=variables,
            optimizer_state=self._update.offloaded(optimizer_state),
            step=state.step + len(batches),
        )
        return after, Metrics(program.names, tails[-1])


def _have_same_bits(one: TrainState, other: TrainState) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(mine).tobytes() == np.asarray(theirs).tobytes() for mine, theirs in pairs)
