"""Several steps in one execution, if that has the same bits as one by one.

XLA compiles the body of a loop otherwise than a program of its own: some gradients of convolutions differ in their last
bits (seen on CPU), so `Trainer` compares before it relies on a program of many steps. There is one only where one
instance drives the only replica: one for several replicas would be compiled otherwise than those of single replicas.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strategies.argument_checks import positive
from strategies.comparing.exactness import are_same, batch_like, variables_like
from strategies.core.metrics import Metrics, tell_end
from strategies.core.step import StepLoop
from strategies.data.datasets import DistributedDataset
from strategies.gradients.arguments import check_state
from strategies.gradients.replica_program import STEP, ReplicaProgram, control_words, with_loss
from strategies.programs.program import jit
from strategies.replicas.replicas import Replicas
from strategies.step.jax_engine import JaxPending, rows_of
from strategies.step.preparation import PreparedStep, StepPrograms
from strategies.train_state import TrainState
from strategies.typing import Batch, OptimizerState, Tree, Variables
from strategies.updates.update import VariableUpdate

logger = logging.getLogger(__name__)


class Executions:
    """Makes steps with all batches of a data set: in one program, after it has compared that with single steps.

    Args:
        replicas: where the replicas are.
        programs: of single steps.
        update: of the variables.
        loop: makes single steps.
        may_fuse: whether steps may be made otherwise.
    """

    def __init__(
        self,
        replicas: Replicas,
        programs: StepPrograms,
        update: VariableUpdate,
        loop: StepLoop[TrainState, JaxPending],
        may_fuse: bool,
    ) -> None:
        self._replicas = replicas
        self._steps = programs
        self._update = update
        self._loop = loop
        self._may_fuse = may_fuse
        self._programs: dict[tuple[int, int], FusedSteps | None] = {}  # None where it has other bits

    def run(
        self,
        state: TrainState,
        dataset: Iterable[Batch],
        steps_per_execution: int,
        after_execution: Callable[[TrainState, Metrics], None],
    ) -> tuple[TrainState, Metrics]:
        """See `Trainer.run`.

        Where one instance drives all replicas and the same steps in one program have the same bits, which is tried out
        the first time, `steps_per_execution` of them run without returning to Python; the log says if not. Otherwise
        instances meet once in every step.
        """
        positive("steps_per_execution", steps_per_execution)
        check_state(state)
        if isinstance(dataset, DistributedDataset):
            dataset.restore(dataset.position())  # the rest of the epoch, not all of it
            dataset = dataset.epoch(dataset.position().epoch)
        batches = iter(dataset)
        metrics: Metrics | None = None
        for batch in batches:
            rest = itertools.islice(batches, steps_per_execution - 1)
            if steps_per_execution > 1 and self._are_possible:
                state, metrics = self._make_all(state, [batch, *rest])
            else:
                state, metrics = self._singly(state, itertools.chain([batch], rest))
            after_execution(state, metrics)
        if metrics is None:
            raise ValueError("there is no batch to make a step with")
        return state, metrics

    def _singly(self, state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        made = Metrics((), np.zeros(0, np.float32))
        for batch in batches:
            state, made = self._loop.make_step(state, batch)
        return state, made

    @property
    def _are_possible(self) -> bool:
        """Whether there is one replica, and neither is a fault to happen in a step nor is each of them recorded."""
        is_single = self._replicas.faults.is_armed or self._loop.is_recorded
        return self._may_fuse and not is_single and self._replicas.num_replicas_in_sync == 1

    def _make_all(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
        """Make a step with each of the batches, in one program if that has the same bits."""
        step = self._steps.prepare(state, batches[0])
        if len(batches) == 1 or not all(self._steps.prepare(state, batch) is step for batch in batches):
            return self._singly(state, batches)
        self._replicas.instruments.step_begins(state.step)
        state, metrics = self._made(step, state, batches)
        self._loop.take_over(metrics)
        return state, metrics

    def _made(self, step: PreparedStep, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Metrics]:
        program = step.program
        key = id(program), len(batches)
        if key not in self._programs:
            fused = FusedSteps(program, self._update)
            if reason := self._why_not(fused, state, batches):
                logger.info("steps are made one by one: %s", reason)
                self._programs[key] = None
                return self._singly(state, batches)
            seed = state.step
            probe = replace(state, variables=variables_like(state.variables, seed))
            others = [batch_like(batch, seed + number) for number, batch in enumerate(batches)]
            wanted = self._steps.gradients_of(step.gradients, probe, others[-1])[-1]
            in_loop = fused.last_gradients(probe.variables, others, probe.step)
            is_same = are_same(wanted, in_loop)
            on_device = replace(state, optimizer_state=self._update.on_device(state.optimizer_state))
            copy = jax.tree.map(jnp.copy, on_device)
            single, metrics = self._singly(state, batches)
            is_same = is_same and are_same([single], [self._make(fused, program, copy, batches)[0]])
            if not is_same:
                logger.info("steps are made one by one: in one program they would have other bits")
            self._programs[key] = fused if is_same else None
            return single, metrics
        found = self._programs[key]
        if found is None:
            return self._singly(state, batches)
        state, tails = self._make(found, program, state, batches)
        metrics = Metrics(program.names, tails[-1])
        tell_end(self._replicas, partial(rows_of, batches[0]), 1, metrics, state.step, tails)
        return state, metrics

    def _why_not(self, fused: FusedSteps, state: TrainState, batches: Sequence[Batch]) -> str:
        """Why steps cannot be made in one program, in words; empty if they can."""
        if state.model_state is not None:
            return "there is a model state"
        has_effects = fused.has_effects(state.variables, self._update.on_device(state.optimizer_state), batches)
        return "the loss function calls back into Python, as feeds do" if has_effects else ""

    def _make(
        self, fused: FusedSteps, program: ReplicaProgram, state: TrainState, batches: Sequence[Batch]
    ) -> tuple[TrainState, jax.Array]:
        """Make the steps; return the state after the last one, and the tails of all."""
        optimizer_state = self._update.on_device(state.optimizer_state)
        variables, optimizer_state, tails = fused(state.variables, optimizer_state, batches, state.step)
        after = replace(
            state,
            variables=variables,
            optimizer_state=self._update.offloaded(optimizer_state),
            step=state.step + len(batches),
        )
        return after, tails


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
        """Return whether the program calls back into Python."""
        words = control_words(0, False, 1.0)
        traced = jax.make_jaxpr(self._steps)(variables, optimizer_state, tuple(batches), np.int32(0), words)
        return bool(traced.effects)

    def last_gradients(self, variables: Variables, batches: Sequence[Batch], step: int) -> list[np.ndarray]:
        """Return the tail and the gradients for the last of the batches, computed in such a loop; for comparison.

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
